"""Every optimizer on every data layout against plain torch on one device: weights after a few steps are the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import foreign_optimizers
import pytest
import torch
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, VOCAB, Dropout, PaddedText, decoder_task, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint import training_state
from paceline.errors import ConfigError, NeedsWholeWeights
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.resume import Progress, RunIdentity, restore, save
from paceline.run.process.handover import hand_over, take_over
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, parse_spec
from paceline.spec.optimizers import RULES, check_options, use_of
from paceline.spec.plan import Plan
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.models.build import build_model
from paceline.task.optimizer.groups import check_groups
from paceline.task.optimizer.schedule import Course, learning_rate
from paceline.task.optimizer.update_scope import scope_known
from paceline.task.profile.limits import closed_by
from paceline.verify.reference import plain_optimizer
from paceline.verify.twin.task import twin_task

STEPS, BATCH = 4, 13
TWO_LAYERS = dataclasses.replace(decoder_task().model, layers=2)
LAYOUTS = [
    (Layout(dp_replicate=2), 3),
    (Layout(dp_shard=2), 1),
    (Layout(dp_shard=2), 2),
    (Layout(dp_shard=3), 3),
    (Layout(dp_replicate=2, dp_shard=2), 3),
    (Layout(tp=2), 3),
    (Layout(tp=2, dp_shard=2), 3),
]


def weights_under(task: Task, layout: Layout, zero: int) -> dict[str, torch.Tensor]:
    """Return the whole weights after the steps under a layout, by name."""
    _, built = run_steps(task, plan_of(layout, batch=BATCH, zero=zero, precision="fp64"), STEPS)
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in built.model.named_parameters()
    }


def weights_by_hand(task: Task, optimizer_of) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of a plain loop: whole batches, one forward pass, an optimizer of torch."""
    model = build_model(task.model, VOCAB, SEQ_LEN, task.seed).double().train()
    optimizer = optimizer_of(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, STEPS + 1):
        positions = torch.arange((step - 1) * BATCH, step * BATCH).numpy()
        rows = PaddedText().read(sample_ids(task.seed, positions, PaddedText.samples))
        logits = model(rows["tokens"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.optimizer.clip_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(task.schedule, peak, step, STEPS, 0, 1)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight, theirs[name], rtol=1e-9, atol=1e-11, msg=lambda text, at=name: f"{at}: {text}"
        )


def halves(model: nn.Module, decay: float) -> list[dict]:
    """Return the default groups: matrices decay, vectors do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(("layout", "zero"), [(Layout(), 3), *LAYOUTS], ids=str)
def test_sgd_equals_torch(layout: Layout, zero: int) -> None:
    task = decoder_task(model=TWO_LAYERS, optimizer=OptimizerSpec(name="sgd", lr=0.2))
    expected = weights_by_hand(task, lambda model: torch.optim.SGD(halves(model, 0.1), lr=0.2, momentum=0.9))
    for whole in run_kept(weights_under, layout.devices, task, layout, zero):
        assert_same(whole, expected)


def split(model: nn.Module, trained) -> tuple[list, list]:
    """Return (name, parameter) of a model in two lists: those that `trained(name, parameter)` picks, and the rest."""
    named = list(model.named_parameters())
    return [p for n, p in named if trained(n, p)], [p for n, p in named if not trained(n, p)]


class Several:
    """Plain optimizers of torch, stepped one after the other."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [group for optimizer in inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad()


class LionByHand:
    """Lion as its paper writes it."""

    def __init__(self, model: nn.Module, lr: float, beta1: float, beta2: float) -> None:
        self.parameters = list(model.parameters())
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.betas, self.param_groups = (beta1, beta2), [{"lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.betas
        for i, p in enumerate(self.parameters):
            update = torch.sign(beta1 * self.momentum[i] + (1 - beta1) * p.grad)
            decay = 0.1 * p if p.dim() > 1 else 0.0
            self.momentum[i] = beta2 * self.momentum[i] + (1 - beta2) * p.grad
            p -= lr * (update + decay)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def muon(model: nn.Module) -> Several:
    """Return Muon for the matrices of the layers, AdamW for the rest."""
    matrices, rest = split(model, lambda n, p: p.dim() == 2 and "embed" not in n and "head" not in n)
    embeddings, vectors = [p for p in rest if p.dim() == 2], [p for p in rest if p.dim() < 2]
    options = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6}
    groups = [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return Several(
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.9), torch.optim.AdamW(groups, **options)
    )


MUON_GROUPS = (GroupSpec(match=("embed*", "*head*"), name="adamw", lr_scale=0.1),)
CASES = {
    "adam": (OptimizerSpec("adam", lr=3e-3, eps=1e-6), lambda m: torch.optim.Adam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "nadam": (OptimizerSpec("nadam", lr=3e-3, eps=1e-6), lambda m: torch.optim.NAdam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "radam": (OptimizerSpec("radam", lr=3e-3, eps=1e-6), lambda m: torch.optim.RAdam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "adamax": (OptimizerSpec("adamax", lr=3e-3, eps=1e-6), lambda m: torch.optim.Adamax(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "adagrad": (OptimizerSpec("adagrad", lr=3e-2, arguments={"eps": 1e-5}), lambda m: torch.optim.Adagrad(
        halves(m, 0.1), lr=3e-2, eps=1e-5)),
    "adadelta": (OptimizerSpec("adadelta", lr=0.5, arguments={"eps": 1e-5}), lambda m: torch.optim.Adadelta(
        halves(m, 0.1), lr=0.5, eps=1e-5)),
    "rmsprop": (OptimizerSpec("rmsprop", lr=3e-3, arguments={"momentum": 0.5, "eps": 1e-5}), lambda m:
        torch.optim.RMSprop(halves(m, 0.1), lr=3e-3, momentum=0.5, eps=1e-5)),
    "lion": (OptimizerSpec("lion", lr=1e-3), lambda m: LionByHand(m, 1e-3, 0.9, 0.95)),
    "adafactor": (OptimizerSpec("adafactor", lr=1e-2), lambda m: torch.optim.Adafactor(halves(m, 0.1), lr=1e-2)),
    "muon": (OptimizerSpec("muon", lr=2e-2, eps=1e-6, arguments={"momentum": 0.9}, groups=MUON_GROUPS), muon),
}  # fmt: skip


OF_MATRICES = ("muon", "adafactor")
EVERY_TIME = ("rmsprop", "lion", "adafactor", "muon")  # one of each kind; the others differ in torch's code alone


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.deep) for name in CASES]
)
def test_optimizers_equal_torch_whatever_the_layout(name: str) -> None:
    layouts = [(Layout(), 3), (Layout(dp_shard=3), 3)]
    assert_equal_to_torch(name, layouts if name not in OF_MATRICES else [*layouts, LAYOUTS[1], LAYOUTS[-1]])


@pytest.mark.deep
@pytest.mark.parametrize("name", OF_MATRICES)
def test_rules_of_whole_matrices_equal_torch_on_every_layout(name: str) -> None:
    assert_equal_to_torch(name, LAYOUTS)


def assert_equal_to_torch(name: str, layouts: list[tuple[Layout, int]]) -> None:
    spec, by_hand = CASES[name]
    task = decoder_task(model=TWO_LAYERS, optimizer=spec)
    expected = weights_by_hand(task, by_hand)
    for layout, zero in layouts:
        for whole in run_kept(weights_under, layout.devices, task, layout, zero):
            assert_same(whole, expected)


def test_every_rule_is_tried_and_told() -> None:
    """What a row of the table asks for elsewhere: CONTRIBUTING.md names these places."""
    elsewhere = {"adamw", "sgd", "adamw8bit"}  # of every other test of steps, and of test_8bit.py
    assert set(RULES) == {*CASES, *elsewhere}
    assert set(RULES) == {*plain_optimizer.CLASSES, *plain_optimizer.OTHERS, "lion"}
    told = next(field for field in dataclasses.fields(OptimizerSpec) if field.name == "name").metadata["doc"]
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "training.md").read_text(encoding="utf-8")
    assert [name for name in RULES if f"'{name}'" not in told or f"`{name}`" not in guide] == []


# ---- optimizers of others ------------------------------------------------------------------------------------------


def foreign(name: str, **changes) -> OptimizerSpec:
    return OptimizerSpec(f"foreign_optimizers:{name}", lr=1e-2, arguments={"power": 0.4}, **changes)


@pytest.mark.parametrize(
    ("path", "arguments", "scope"),
    [
        ("foreign_optimizers:Counting", {}, "element"),
        ("foreign_optimizers:Centred", {}, "parameter"),
        ("foreign_optimizers:Trusting", {}, "model"),
        ("foreign_optimizers:Late", {}, "parameter"),
        ("foreign_optimizers:CountingInGroups", {}, "element"),
        ("foreign_optimizers:Tamed", {}, "parameter"),
        ("foreign_optimizers:Skipping", {}, "model"),
        ("foreign_optimizers:ByPlace", {}, "model"),
        ("foreign_optimizers:ForKernels", {}, "parameter"),
        ("foreign_optimizers:ForWideMatrices", {}, "parameter"),
        ("foreign_optimizers:OfLargeMatrices", {}, "model"),  # the trial ended with its error, of smaller ones
        ("foreign_optimizers:TamedIfLarge", {}, "parameter"),  # "element": large gradients were given to small ones
        ("foreign_optimizers:RateInATensor", {}, "element"),  # refused, as if it had changed its rate
        ("foreign_optimizers:Refusing", {}, "element"),  # far beyond what a trial's first steps give it
        ("torch.optim:AdamW", {"amsgrad": True}, "element"),
        ("torch.optim:Rprop", {}, "element"),
        ("torch.optim:ASGD", {}, "element"),
        ("torch.optim:Muon", {}, "parameter"),
        ("torch.optim:Adafactor", {}, "parameter"),
        ("paceline.task.optimizer.lion:Lion", {}, "element"),
    ],
)
def test_a_trial_tells_what_an_update_depends_on(path: str, arguments: dict, scope: str) -> None:
    assert scope_known(use_of(OptimizerSpec(), path, arguments)).scope == scope


def test_an_optimizer_is_tried_once_a_process() -> None:
    """Each part of a proof and each start in its story made the whole trial again: of Muon 3 s of CPU every time."""
    made: list[object] = []

    def factory(params: Any, lr: float, **arguments: Any) -> torch.optim.Optimizer:
        made.append(arguments)
        return foreign_optimizers.Counting(params, lr, **arguments)

    def tried(**arguments: Any) -> int:
        before = len(made)
        assert scope_known(use_of(OptimizerSpec(), factory, arguments)).scope == "element"
        return len(made) - before

    assert tried(power=0.5) > 5 and tried(power=0.5) == 0, "the same once more"
    assert tried(power=0.25) > 5, "another argument may have another scope"


@pytest.mark.parametrize("name", ["Counting", "Centred"])
def test_optimizers_by_import_path_equal_their_plain_loop(name: str) -> None:
    def by_hand(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(foreign_optimizers, name)(halves(model, 0.1), lr=1e-2, power=0.4)

    task = decoder_task(model=TWO_LAYERS, optimizer=foreign(name))
    expected = weights_by_hand(task, by_hand)
    for layout, zero in [(Layout(), 3), (Layout(dp_shard=3), 3), (Layout(tp=2, dp_shard=2), 2)]:
        for whole in run_kept(weights_under, layout.devices, task, layout, zero):
            assert_same(whole, expected)


def test_what_cannot_be_exact_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="draws random numbers"):
        scope_known(use_of(OptimizerSpec(), "foreign_optimizers:Noisy", {}))
    with pytest.raises(ConfigError, match="the optimizer 'foreign_optimizers:Closing' makes no step"):
        scope_known(use_of(OptimizerSpec(), "foreign_optimizers:Closing", {}))
    with pytest.raises(ConfigError, match="makes no step") as asserting:
        scope_known(use_of(OptimizerSpec(), "foreign_optimizers:Asserting", {}))
    assert "AssertionError: requires closure" in asserting.value.because
    for name, because in (("Slow", "such as steps"), ("Listing", "'seen' is a list")):
        with pytest.raises(ConfigError, match="cannot go on from a checkpoint") as lost:
            scope_known(use_of(OptimizerSpec(), f"foreign_optimizers:{name}", {}))
        assert because in lost.value.because
    for name, because in (
        ("Regrouping", "was given 1, and has 2"),
        ("FasterVectors", "other learning rates"),
    ):
        with pytest.raises(ConfigError, match="makes parameter groups of its own") as own:
            scope_known(use_of(OptimizerSpec(), f"foreign_optimizers:{name}", {}))
        assert because in own.value.because and "lr_scale" in own.value.try_
    closed = closed_by(foreign("Trusting"))
    assert {"dp_shard", "tp", "pp"} <= set(closed) and "what others are" in closed["dp_shard"]
    assert "dp_replicate" not in closed and set(closed_by(foreign("Counting"))) == {"offload"}
    with pytest.raises(NeedsWholeWeights, match="cannot be sharded"):  # so that a story of copies goes on on copies
        run_ranks(weights_under, 2, decoder_task(optimizer=foreign("Trusting")), Layout(dp_shard=2), 3)
    with pytest.raises(ConfigError, match="again and again"):
        use_of(OptimizerSpec(), "torch.optim:LBFGS", {})
    with pytest.raises(ConfigError, match="did you mean 'nesterov'"):
        use_of(OptimizerSpec("sgd"), "sgd", {"nesterow": True})
    with pytest.raises(ConfigError, match="did you mean 'adagrad'"):
        check_options(OptimizerSpec("adagrat"))
    for spec in (OptimizerSpec("sgd", beta2=0.5), OptimizerSpec("adafactor", beta1=0.5)):
        with pytest.raises(ConfigError, match="is not read by"):
            check_options(spec)


# ---- parameter groups ----------------------------------------------------------------------------------------------

GROUPS = (
    GroupSpec(match=("layers.0.*.weight",), lr_scale=0.5, weight_decay=0.3),
    GroupSpec(match=("*norm.weight", "layers.0.*"), weight_decay=0.2, arguments={"betas": [0.8, 0.9]}),
    GroupSpec(match=("embed_tokens.*",), lr_scale=0.0),  # tied to the head: the last stage of a pipeline has it too
)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the groups that GROUPS means, written out by hand."""
    sets: list[list[nn.Parameter]] = [[], [], [], [], []]
    for name, p in model.named_parameters():
        if name.startswith("layers.0.") and name.endswith(".weight"):
            sets[0].append(p)
        elif name.endswith("norm.weight"):
            sets[1].append(p)
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            sets[2].append(p)
        else:
            sets[3 if p.dim() >= 2 else 4].append(p)
    options = [
        {"weight_decay": 0.3, "lr": 1.5e-3},
        {"weight_decay": 0.2, "betas": (0.8, 0.9)},
        {"weight_decay": 0.1, "lr": 0.0},
        {"weight_decay": 0.1},
        {"weight_decay": 0.0},
    ]
    groups = [{"params": chosen, **option} for chosen, option in zip(sets, options, strict=True) if chosen]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-6)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(pp=2), Layout(tp=2, dp_shard=2)], ids=str)
def test_groups_equal_those_of_a_plain_loop(layout: Layout) -> None:
    model = dataclasses.replace(TWO_LAYERS, tied=True)
    task = decoder_task(model=model, optimizer=OptimizerSpec(lr=3e-3, eps=1e-6, groups=GROUPS))
    expected = weights_by_hand(task, grouped)
    for whole in run_kept(weights_under, layout.devices, task, layout, 3):
        known = {**expected, "lm_head.weight": expected["embed_tokens.weight"]}  # a stage's own name for it
        assert_same(whole, {name: known[name] for name in whole})


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((GroupSpec(match=("*.biass",)),), "matches no parameter"),
        ((GroupSpec(match=("layers.1.mlp.gate_prj.weight",)),), r"did you mean 'layers\.1\.mlp\.gate_proj\.weight'"),
        ((GroupSpec(match=("*",)), GroupSpec(match=("*norm*",))), "belong to groups before it"),
        ((GroupSpec(),), "has no pattern"),
    ],
)
def test_a_group_without_parameters_is_an_error(groups: tuple, says: str) -> None:
    names = [n for n, _ in build_model(decoder_task().model, VOCAB, SEQ_LEN, 1, device="meta").named_parameters()]
    with pytest.raises(ConfigError, match=says):
        check_groups(OptimizerSpec(groups=groups), names)


# ---- resume --------------------------------------------------------------------------------------------------------


def trained(task: Task, plan: Plan, folder: str, first: int, last: int) -> dict[str, torch.Tensor]:
    """Return whole weights and state after steps `first` to `last`; go on from what is saved, and save at the end."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    course = Course("constant", task.optimizer.lr, 1.0, last, 0, 1)
    run = RunIdentity(Path(folder), Spec(task=task), "", course)
    restored = restore(run, built, plan, world)
    assert (restored.progress.step if restored else 0) == first - 1
    for step in range(first, last + 1):
        built.stepper.step(stream.at((step - 1) * plan.batch_samples), task.optimizer.lr)
    progress = Progress(last, last * plan.batch_samples)
    save(run, built, plan, world, progress)
    state = training_state(built.model, built.optimizer)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for n, t in state.items()}


UNREACHED = decoder_task(model=Dropout, objective="next_token")


@pytest.mark.parametrize(
    ("task", "before", "after"),
    [
        (decoder_task(model=TWO_LAYERS, optimizer=CASES["muon"][0]), Layout(dp_shard=2), Layout(dp_shard=2)),
        (decoder_task(model=TWO_LAYERS, optimizer=CASES["muon"][0]), Layout(dp_shard=2), Layout(tp=2)),
        (decoder_task(model=TWO_LAYERS, optimizer=CASES["adafactor"][0]), Layout(), Layout(dp_shard=2)),
        (dataclasses.replace(UNREACHED, optimizer=foreign("Counting")), Layout(dp_shard=2), Layout(dp_shard=2)),
        (dataclasses.replace(UNREACHED, optimizer=OptimizerSpec("nadam")), Layout(dp_shard=2), Layout(dp_shard=2)),
        (decoder_task(model=TWO_LAYERS, optimizer=foreign("CountingInGroups")), Layout(dp_shard=2), Layout()),
    ],
    ids=["muon", "muon moved", "adafactor moved", "foreign", "nadam", "counts in groups, moved"],
)
def test_training_goes_on_where_it_was(task: Task, before: Layout, after: Layout, tmp_path: Path) -> None:
    plans = [plan_of(layout, batch=12, precision="fp64") for layout in (before, after)]
    whole, parted = str(tmp_path / "whole"), str(tmp_path / "parted")
    expected = run_ranks(trained, after.devices, task, plans[1], whole, 1, 4)[0]
    run_ranks(trained, before.devices, task, plans[0], parted, 1, 2)
    for found in run_ranks(trained, after.devices, task, plans[1], parted, 3, 4):
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            if before == after:
                assert torch.equal(tensor, expected[name]), name
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["sgd", "lion", "adafactor"])
def test_a_twin_travels_to_other_processes(name: str, tmp_path: Path) -> None:
    """A twin has a larger eps than the task, which these rules do not read: it is no mistake of the user's."""
    spec = parse_spec(f"[task.optimizer]\nname = '{name}'")
    twin = dataclasses.replace(spec, task=twin_task(spec.task, plan_of(Layout(dp_shard=2)), VOCAB))
    assert take_over(hand_over(twin, tmp_path)).task == twin.task
