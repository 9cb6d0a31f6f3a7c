"""Distillation: a student learns the logits and hidden states of a frozen teacher (Hinton et al. 2015, 1503.02531).

    loss of a token = (1 - w) * cross-entropy + w * T^2 * KL(teacher / T || student / T) + v * mean squared difference

of the hidden states of blocks that stand at the same part of both models. Both are one module, so the teacher is priced
with the student, and proven with it; it rests as the student does, or spread over all data ranks. Checkpoints hold the
student alone: the teacher is made, or read, anew by every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.data.labels import IGNORED
from paceline.spec.task import ModelSpec
from paceline.task.adapt.teacher import Teacher, logits_of
from paceline.task.models.blocks import find_blocks
from paceline.task.models.build import build_model

STUDENT, TEACHER = "student.", "teacher."


class Distilled(nn.Module):
    """A student and its frozen teacher; called with labels it returns (loss_sum, weight), else the student's logits."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module, temperature: float = 2.0, weight: float = 0.5, hidden: float = 0.0
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, Teacher(teacher).eval()
        self.temperature, self.weight, self.hidden = temperature, weight, hidden
        self._states: dict[str, list[Tensor]] = {STUDENT: [], TEACHER: []}
        pairs = _paired(student, teacher) if hidden else []
        for own, theirs in pairs:
            own.register_forward_hook(self._keep(STUDENT))
            theirs.register_forward_hook(self._keep(TEACHER))
        widths = _width(student), _width(teacher)
        self.bridge = nn.Linear(*widths, bias=False) if pairs and widths[0] != widths[1] else nn.Identity()
        self.register_state_dict_post_hook(partial(kept_alone, STUDENT, TEACHER))

    def _keep(self, whose: str) -> Any:
        def look(module: nn.Module, args: object, out: Any) -> None:
            self._states[whose].append(out[0] if isinstance(out, tuple) else out)

        return look

    def forward(self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Any:
        """Return (loss_sum, weight) over the labels [rows, seq] that count, or without labels logits.

        With `documents` [rows, seq] neither model sees another document than a token's own.
        """
        for kept in self._states.values():
            kept.clear()
        own = logits_of(self.student, tokens, documents)
        if labels is None:
            return own
        theirs = self.teacher(tokens, documents)
        if own.shape != theirs.shape:
            raise ConfigError(
                f"a teacher of {theirs.shape[-1]:,} token values and a student of {own.shape[-1]:,}",
                "their logits are compared value by value", "one tokenizer, and model.vocab the same in both",
            )  # fmt: skip
        counted = labels != IGNORED
        return self._loss(own[counted], theirs[counted], labels[counted]) + self._apart(counted), counted.sum()

    def _loss(self, own: Tensor, theirs: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of logits [tokens, vocab], in fp32 or wider."""
        wide = torch.promote_types(own.dtype, torch.float32)
        own, theirs = own.to(wide), theirs.to(wide)
        scale = self.temperature
        divergence = F.kl_div((own / scale).log_softmax(-1), (theirs / scale).log_softmax(-1), reduction="sum",
                              log_target=True)  # fmt: skip
        cross_entropy = F.cross_entropy(own, labels, reduction="sum")
        return (1 - self.weight) * cross_entropy + self.weight * scale**2 * divergence

    def _apart(self, counted: Tensor) -> Tensor:
        """Return the mean squared difference of hidden states, over layers and widths, summed over tokens."""
        own, theirs = self._states[STUDENT], self._states[TEACHER]
        total = torch.zeros((), device=counted.device)
        for mine, taught in zip(own, theirs, strict=True):
            wide = torch.promote_types(mine.dtype, torch.float32)
            apart = self.bridge(mine).to(wide) - taught.to(wide)
            total = total + self.hidden / len(own) * apart[counted].square().mean(-1).sum()
        for kept in self._states.values():
            kept.clear()
        return total


def distilled(
    student: Mapping[str, Any],
    teacher: Mapping[str, Any],
    vocab: int,
    temperature: float = 2.0,
    weight: float = 0.5,
    hidden: float = 0.0,
) -> Distilled:
    """Return a student and its teacher: a factory for `task.model`, whose arguments are the options of two models.

    `vocab` is that of the tokenizer (257 of bytes), `weight` the part of the loss that the teacher's logits have,
    `hidden` what hidden states weigh; 0 leaves them out.
    """
    own, theirs = (build_model(ModelSpec(**given), vocab, 0, seed) for seed, given in enumerate((student, teacher)))
    return Distilled(own, theirs, temperature, weight, hidden)


def distillation(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a student against its teacher, and the count of labels that are not -100.

    A batch whose "documents" are told apart is read document by document, by both. Raises ConfigError for a model that
    cannot be told of them.
    """
    apart = {"documents": batch["documents"]} if "documents" in batch else {}
    found: tuple[Tensor, Tensor] = model(batch["tokens"], labels=batch["labels"], **apart)
    return found


def student_of(model: ModelSpec) -> ModelSpec | None:
    """Return the student of a model that `distilled` makes, None for other models."""
    path = f"{distilled.__module__}:{distilled.__name__}"
    return ModelSpec(**model.arguments["student"]) if model.name == path else None


def _paired(student: nn.Module, teacher: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return each block of the student with the teacher's that stands at the same part of the depth.

    Of a student that is deeper the first blocks have the teacher's first.
    """
    own, theirs = ([block for _, block in find_blocks(model)] for model in (student, teacher))
    if not own or not theirs:
        raise ConfigError("hidden states are compared block by block", "a model has no repeated blocks", "hidden = 0")
    return [(block, theirs[max(1, (at + 1) * len(theirs) // len(own)) - 1]) for at, block in enumerate(own)]


def _width(model: nn.Module) -> int:
    """Return the width of the hidden states: that of the embedding."""
    return next((module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding)), 0)


def kept_alone(trained: str, frozen: str, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """Take the frozen model out of a state, and the trained one's prefix from its names."""
    for name in [name for name in state if name.startswith(prefix + frozen)]:
        del state[name]
    for name in [name for name in state if name.startswith(prefix + trained)]:
        state[prefix + name.removeprefix(prefix + trained)] = state.pop(name)
