"""Pipeline: the model is cut into stages, each with its own consecutive blocks of the chain.

A stage is the same class with the modules of other stages left out, so every parameter keeps its full name: initial
weights, checkpoints and proofs see no difference. Nothing here moves data; run/parallel/pipeline/passes.py does.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.feasible.stages import blocks_per_stage, refusal, stages_of
from paceline.run.numerics.randomness.again import DRAWS_BY
from paceline.run.parallel.apply import apply_plan
from paceline.run.parallel.gradients import Gradients
from paceline.run.process.groups import Mesh
from paceline.spec.plan import Plan
from paceline.task.declared import declared_rules
from paceline.task.models.chain import OPENED_BY, chain_of, is_hugging_face
from paceline.task.models.held import local_of
from paceline.task.models.layers.absent import Absent
from paceline.task.rules import Rules

# What classes of Hugging Face do outside of their modules, by the name in their config or object, and the value that
# does nothing: to logits (Gemma caps them as c * tanh(logits / c), Granite and Cohere scale them), and to embeddings.
TO_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
TO_EMBEDDINGS = {"embedding_multiplier": 1.0}


@dataclass
class Stage:
    """One stage of the pipeline on this rank: a model without the modules of other stages."""

    index: int
    is_first: bool
    is_last: bool
    module: nn.Module
    blocks: list[nn.Module]  # its repeated blocks
    first_block: int = 0  # the number of the first of them in the whole chain
    gradients: Gradients | None = None  # once the plan is applied


@dataclass
class Pipeline:
    """This rank's stages, and `model`: one module that holds the parameters of all of them under their full names."""

    model: nn.Module
    stages: list[Stage]
    group: dist.ProcessGroup
    shared: list[str] = field(default_factory=list)  # parameters that the first and the last stage both hold
    rules: Rules | None = None  # of the whole model, where the plan splits its layers

    def apply(self, plan: Plan, mesh: Mesh) -> PipelineGradients:
        """Apply the rest of the plan to every stage and return how their gradients are summed."""
        for stage in self.stages:
            stage.gradients = apply_plan(stage.module, stage.blocks, plan, mesh, self.rules, stage.first_block)
        return PipelineGradients(self)

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return this rank's copies of the trained parameters that the first and the last stage share."""
        if not any(stage.is_first or stage.is_last for stage in self.stages):
            return []
        held = dict(self.model.named_parameters())
        return [held[name] for name in self.shared if held[name].requires_grad]


def split_model(model: nn.Module, plan: Plan, mesh: Mesh) -> Pipeline:
    """Return this rank's stages of a model that is whole (on any device, the meta device too).

    Raises DoesNotFit where the model declares no chain or the plan's pipeline cannot run on it, and ConfigError for a
    parameter that belongs to no stage.
    """
    declared = declared_rules(model) if plan.layout.tp > 1 else None
    if declared is not None:
        declared.check(name for name, _ in model.named_modules())
    cut = Cut(model, plan)
    stages = [cut.stage(index) for index in stages_of(mesh.get_local_rank("pp"), plan)]
    union = stages[0].module if len(stages) == 1 else cut.part([stage.index for stage in stages])
    return Pipeline(union, stages, mesh.get_group("pp"), cut.shared, declared)


class Cut:
    """A whole model and where its stages begin and end. Stages share its modules; it is not changed."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        rules = chain_of(model)
        if rules is None:
            raise DoesNotFit(f"{type(model).__name__} cannot be split into stages", OPENED_BY, "pp = 1")
        modules = dict(model.named_modules())
        names = [f"{rules.blocks}.{name}" for name, _ in modules[rules.blocks].named_children()]
        because = refusal(plan, len(names))
        if because:
            raise DoesNotFit(f"the pipeline of {plan} cannot be had", because, "another pp, schedule or micro-batch")
        _check_every_parameter_has_a_stage(model, rules)
        self._model, self._rules, self._blocks = model, rules, names
        self._held = _names_by_stage(rules, names, blocks_per_stage(plan, len(names)))
        # Parameters that the first and the last stage both hold.
        both = [name for name in rules.first if name in rules.last]
        self.shared = [f"{name}.{p}" for name in both for p, _ in modules[name].named_parameters()]

    def stage(self, index: int) -> Stage:
        """Return one stage."""
        last = index == len(self._held) - 1
        module = self.part([index])
        inside = dict(module.named_modules())
        if last:
            for name in (name for name in self._rules.first if name in self._rules.last):
                inside[name].forward = _first_input  # it is here for its weights alone
        else:
            _leave_out(module, TO_LOGITS)
        if index:
            _leave_out(module, TO_EMBEDDINGS)
        blocks = [inside[name] for name in self._blocks if name in self._held[index]]
        first = next(at for at, name in enumerate(self._blocks) if name in self._held[index])
        return Stage(index, index == 0, last, module, blocks, first)

    def part(self, stages: Iterable[int]) -> nn.Module:
        """Return the model without the modules of all other stages."""
        kept = {name for stage in stages for name in self._held[stage]}
        absent = {name for held in self._held for name in held} - kept
        # A Hugging Face forward pass looks up a layer's kind by its place in the list, so places are kept.
        return _without(self._model, absent, keep_places=is_hugging_face(self._model))


def _names_by_stage(rules: Rules, blocks: Sequence[str], counts: Sequence[int]) -> list[set[str]]:
    """Return the names of the modules that each stage has."""
    held, start = [], 0
    for count in counts:
        held.append(set(blocks[start : start + count]))
        start += count
    held[0].update(rules.first)
    held[-1].update(rules.last)
    return held


def _without(module: nn.Module, absent: set[str], keep_places: bool, prefix: str = "") -> nn.Module:
    """Return a module without the named descendants; subtrees that lose nothing are shared, not copied."""
    if not any(name.startswith(prefix) for name in absent):
        return module
    part = copy.copy(module)
    if vars(part).pop(DRAWS_BY, None) is not None:
        vars(part).pop("forward", None)  # which would call the whole module's
    for key, value in list(vars(part).items()):
        if isinstance(value, dict):  # children, and hooks that sharding will add to this part alone
            vars(part)[key] = value.copy()
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if full in absent and isinstance(module, nn.ModuleList) and not keep_places:
            delattr(part, name)
        else:
            setattr(part, name, Absent() if full in absent else _without(child, absent, keep_places, f"{full}."))
    return part


def _leave_out(stage: nn.Module, done: Mapping[str, float | None]) -> None:
    """Have a Hugging Face stage take or hand on its hidden states as they are, where its class does more outside of
    the modules that the stage has: `done` are the names of that, with the values under which nothing is done."""
    for holder in (stage, getattr(stage, getattr(stage, "base_model_prefix", None) or "", None)):
        config = getattr(holder, "config", None)
        if config is None:
            continue
        vars(holder).update({name: value for name, value in done.items() if name in vars(holder)})
        if stated := {name: value for name, value in done.items() if getattr(config, name, None) is not None}:
            vars(holder)["config"] = config = copy.copy(config)
            for name, value in stated.items():
                setattr(config, name, value)


def _first_input(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return x


def _check_every_parameter_has_a_stage(model: nn.Module, rules: Rules) -> None:
    """Raise ConfigError for a parameter outside the chain, or one that two stages would hold without saying so."""
    places = (*rules.first, rules.blocks, *rules.last)
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = next((place for place in places if name.startswith(f"{place}.")), None)
        if place is None:
            raise ConfigError(
                f"parameter '{name}' is in no pipeline stage",
                f"the model's chain is {', '.join(rules.first)}, the blocks in {rules.blocks}, {', '.join(rules.last)}",
                "name its module in `first` or `last` of the model's rules",
            )
        block = name.split(".")[rules.blocks.count(".") + 1] if place == rules.blocks else ""
        owner = f"{place}.{block}" if block else "last" if place in rules.last else "first"
        if owners.setdefault(id(parameter), owner) != owner:
            raise ConfigError(
                f"parameter '{name}' is shared by {owners[id(parameter)]} and {owner}",
                "blocks that share weights may lie on different pipeline stages, and would drift apart",
                "pp = 1",
            )


@dataclass
class PipelineGradients:
    """Gradients of a rank's stages. Weights that the first and last stage share get the sum of both gradients."""

    pipeline: Pipeline

    def zero(self) -> None:
        """Forget the last step's gradients."""
        for gradients in self._each():
            gradients.zero()

    def before_micro_batch(self, last: bool) -> None:
        """Do nothing: backward passes of stages come in the schedule's order, and each stage is told of its own."""

    def finish(self) -> None:
        """Return once the sums are complete."""
        for gradients in self._each():
            gradients.finish()
        for parameter in self.pipeline.shared_parameters():
            self._add_partners(parameter)

    def unreached(self) -> int:
        """Return how many parameters of its stages this rank's backward passes did not reach."""
        with self._shared_kept():
            return sum(gradients.unreached() for gradients in self._each())

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        with self._shared_kept():
            for gradients in self._each():
                gradients.settle()

    @contextlib.contextmanager
    def _shared_kept(self) -> Iterator[None]:
        """Within it a stage may take gradients from what its ranks did not reach; shared weights keep both stages'."""
        shared = [(parameter, parameter.grad) for parameter in self.pipeline.shared_parameters()]
        yield
        for parameter, gradient in shared:
            parameter.grad = gradient

    def _each(self) -> list[Gradients]:
        return [stage.gradients for stage in self.pipeline.stages if stage.gradients is not None]

    def _add_partners(self, parameter: nn.Parameter) -> None:
        """Add the gradient that the other end of the pipeline has for its copy. Both get the same sum, bit for bit."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = local_of(parameter.grad)
        if not grad.numel():
            return
        group = self.pipeline.group
        ranks = dist.get_process_group_ranks(group)
        partner = ranks[-1] if dist.get_rank() == ranks[0] else ranks[0]
        theirs = torch.empty_like(grad)
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, grad.contiguous(), partner, group),
            dist.P2POp(dist.irecv, theirs, partner, group),
        ]):  # fmt: skip
            work.wait()
        grad.add_(theirs)
