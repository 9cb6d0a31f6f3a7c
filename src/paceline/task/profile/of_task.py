"""The profile of a task's model: computed from its shape where the family is known, traced where it is not."""

from __future__ import annotations

import dataclasses

from paceline.spec.profile import ModelProfile
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.facts import DataFacts
from paceline.task.known_sum import is_known_sum
from paceline.task.models.sizes import is_factory
from paceline.task.profile.kept_profiles import trace_once
from paceline.task.profile.limits import close_for_task


def profile_task(task: Task, facts: DataFacts) -> ModelProfile:
    """Return the model's profile: analytic for the built-in family on its own objective, else traced.

    Closed in it are also the axes that the task's optimizers close.
    """
    profile = _profile_model(task, facts)
    if not task.adaptation.is_full and profile.source == "analytic":
        from paceline.task.models.build import build_model
        from paceline.task.profile.adapted import adapted_profile

        given = facts.vocab or 0, facts.items_per_sample, task.seed, "meta", task.adaptation
        profile = adapted_profile(profile, build_model(task.model, *given))
    of_files = profile.source == "analytic" and isinstance(task.data, DataSpec)
    masked = of_files and not task.data.cross_documents  # a data set of the user's own says nothing of documents
    return close_for_task(dataclasses.replace(profile, masked=masked, summed=is_known_sum(task)), task, facts)


def _profile_model(task: Task, facts: DataFacts) -> ModelProfile:
    if is_built_in(task, facts):
        from paceline.task.models.huggingface.transfer import fit_decoder
        from paceline.task.models.shape import MoEConfig
        from paceline.task.models.sizes import resolve_decoder
        from paceline.task.profile.decoder import profile_decoder
        from paceline.task.profile.moe import profile_moe

        config = resolve_decoder(task.model, facts.vocab or 0, facts.items_per_sample)
        if task.model.starts_from:
            fit_decoder(config, task.model.starts_from, task.model.fresh)
        if isinstance(config, MoEConfig):
            return profile_moe(config, facts.items_per_sample)
        return profile_decoder(config, facts.items_per_sample)
    return trace_once(task, facts)


def is_built_in(task: Task, facts: DataFacts) -> bool:
    """Return whether the model is of the built-in family on its own objective: its profile is computed, not traced."""
    named = isinstance(task.model, ModelSpec) and not is_factory(task.model.name)
    return named and facts.unit == "tokens" and task.objective in ("auto", "next_token") and not task.turns
