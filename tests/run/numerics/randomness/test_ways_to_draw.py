"""However a program draws: its numbers belong to the sample, or they are named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import drawing_models
import numpy as np
import pytest
import torch
import ways_to_draw as ways
from distributed import run_ranks
from tests_huggingface import hf_task
from tests_shared import SEQ_LEN, decoder_task, plan_of, run_steps, world_here
from torch import nn

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import Survey, survey
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.units import Amount
from paceline.verify.compare.whole_batch import whole_batch

BATCH = 12
CPU = torch.device("cpu")


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def task_of(build: Callable[[], nn.Module]) -> Task:
    batch = Amount(BATCH, "samples")
    return decoder_task(model=made(build), objective="next_token", global_batch=batch)


def fp64(layout: Layout | None = None, **changes: Any) -> Plan:
    return plan_of(layout or Layout(), **{"batch": BATCH, "precision": "fp64", **changes})


def next_token_by_another_name(model: nn.Module, batch: Any) -> Any:
    return next_token(model, batch)


def losses(task: Task, plan: Plan, steps: int = 2) -> list[float]:
    return [stats.loss for stats in run_steps(task, plan, steps)[0]]


def looked(build: Callable[[], nn.Module], precision: torch.dtype = torch.float32) -> Survey:
    rows = decoder_task().data.read(torch.arange(4).numpy())
    return survey(made(build).to(precision), next_token, rows, CPU)


BUILT = {
    **{way.__name__: (lambda way=way: ways.Drawing(way)) for way in (*ways.EXACT, ways.fixed_noise)},
    **{name: (lambda make=make: ways.Inside(make())) for name, make in ways.INSIDE.items()},
}


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.filterwarnings("error::UserWarning")
def test_numbers_belong_to_the_sample(name: str) -> None:
    build = BUILT[name]
    whole = losses(task_of(build), fp64(micro_batch=BATCH))
    for micro_batch in (1, 5):
        assert losses(task_of(build), fp64(micro_batch=micro_batch)) == pytest.approx(whole, rel=1e-11)
    assert not looked(build).strays and (looked(build).patterns or name == "fixed_noise")


def test_recurrent_layers_of_single_precision_draw_the_same() -> None:
    whole = losses(task_of(BUILT["GRU"]), fp64(micro_batch=BATCH), 1)
    narrow = losses(task_of(BUILT["GRU"]), fp64(micro_batch=3, precision="fp32"), 1)
    assert narrow == pytest.approx(whole, rel=1e-5), "oneDNN's kernel would draw other masks"


CLOSED = {
    **{way.__name__: ((lambda way=way: ways.Drawing(way)), reason) for way, reason in ways.NAMED},
    "held generator": (ways.HeldGenerator, "HeldGenerator.numbers"),
    "TorchScript": (ways.Scripted, "past torch's functions"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_numbers_of_no_sample_are_named_before_the_first_step(name: str) -> None:
    build, reason = CLOSED[name]
    world = world_here()
    with pytest.warns(UserWarning, match="random numbers follow the micro-batch"):
        assemble(task_of(build), fp64(micro_batch=4), world, decoder_task().data, SEQ_LEN)
    assert any(reason in stray for stray in looked(build).strays)
    checked = whole_batch(task_of(build), fp64(), world, decoder_task().data, SEQ_LEN, 1, {})
    assert reason in checked.left_out, "a proof says so too"


PLANNED = {
    "mixed_rows": "randperm (over the samples of a micro-batch)",
    "partners": "randint (over the samples of a micro-batch)",
    "best_row": "multinomial (over the samples of a micro-batch)",
    "by_numpy": "numpy.random",
    "by_python": "Python's module random",
    "gamma": "_sample_dirichlet",
    "row by row": "(called more often for more samples)",
    "pairs": "rand (over the samples of a micro-batch)",
}


@pytest.mark.parametrize("name", PLANNED)
def test_the_planner_names_them_too(name: str) -> None:
    others = {"row by row": drawing_models.RowByRow, "pairs": drawing_models.OfPairs}
    closed = profiled(others[name]() if name in others else CLOSED[name][0]())
    assert all(PLANNED[name] in closed[axis] for axis in ("dp_replicate", "dp_shard", "pp", "accumulation"))


@pytest.mark.parametrize("name", BUILT)
def test_the_planner_leaves_the_others_open(name: str) -> None:
    assert not {"dp_replicate", "dp_shard", "accumulation"} & profiled(BUILT[name]()).keys()


def profiled(model: nn.Module) -> dict[str, str]:
    batch = decoder_task().data.read(torch.arange(2).numpy())
    return profile_module(model, batch, next_token).closed_axes or {}


def test_several_devices_do_not_draw_for_nobody() -> None:
    with pytest.raises(ConfigError, match="n = 2 for 2 samples is 3 for 3"):
        run_ranks(losses, 2, task_of(mixed), fp64(Layout(dp_replicate=2)))


def mixed() -> nn.Module:
    return ways.Drawing(ways.mixed_rows)


def test_noise_that_is_drawn_in_the_backward_pass_is_named() -> None:
    with pytest.warns(UserWarning, match="random numbers of the backward pass follow the micro-batch"):
        losses(task_of(ways.NoiseOfGradients), fp64(micro_batch=4), 1)
    with pytest.raises(ConfigError, match="the backward pass: a hook or a function of the program draws there"):
        run_ranks(losses, 2, task_of(ways.NoiseOfGradients), fp64(Layout(dp_replicate=2)))


def stands(model: ways.HeldGenerator) -> list[Any]:
    own = model.numbers.bit_generator.state, ways.SHARED.get_state().tolist()
    return [*own, random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def test_a_look_moves_nothing() -> None:
    model = ways.HeldGenerator()
    others = [ways.Drawing(way) for way in (ways.by_numpy, ways.by_python, ways.by_a_generator, ways.bernoulli)]
    before = stands(model)
    rows = decoder_task().data.read(torch.arange(4).numpy())
    for one in (model, *others):
        survey(one, next_token, rows, CPU)
    assert stands(model) == before


# ---- programs that do not take every number of samples ---------------------------------------------------------------


def only_one() -> nn.Module:
    return ways.Only(ways.one)


def only_even() -> nn.Module:
    return ways.Only(ways.even)


def only_four() -> nn.Module:
    return ways.Only(ways.four)


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_program_of_even_numbers_is_looked_at_with_these() -> None:
    unbound = losses(task_of(lambda: ways.Only(bool)), fp64(micro_batch=BATCH))
    for micro_batch in (2, 4):
        assert losses(task_of(only_even), fp64(micro_batch=micro_batch)) == pytest.approx(unbound, rel=1e-11)


@pytest.mark.parametrize(("only", "rows"), [(only_one, 1), (only_four, 4)])
def test_a_program_of_one_number_of_samples_cannot_be_looked_at_and_says_so(only: Any, rows: int) -> None:
    reason = "could not be looked at with other numbers of samples, RuntimeError: no batch of 2 rows, please"
    with pytest.warns(UserWarning, match=reason):
        losses(task_of(only), fp64(micro_batch=rows), 1)
    with pytest.raises(ConfigError, match=reason):
        run_ranks(losses, 3, task_of(only), fp64(Layout(dp_replicate=3), micro_batch=rows))
    with pytest.raises(ConfigError, match="no batch of 2 rows, please"):
        profiled(only())


class Unlike(ways.Only):
    """A model that does not take the same row twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(torch.unique(tokens, dim=0)) < len(tokens):
            raise RuntimeError("each row once, please")
        return super().forward(tokens)


def test_a_program_that_takes_no_look_at_all_is_said_to_be_unseen() -> None:
    task = task_of(lambda: Unlike(bool))
    with pytest.warns(UserWarning, match="each row once, please: they are taken to be those of samples along"):
        _, built = run_steps(task, fp64(micro_batch=4), 1)
    (said,) = built.remarks
    assert "each row once, please: whose its random numbers are is a guess" in said


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_program_of_one_number_of_samples_that_draws_nothing_is_left_in_peace() -> None:
    task = task_of(lambda: ways.Only(ways.four, drops=0.0))
    world = world_here()
    assert assemble(task, fp64(micro_batch=4), world, task.data, SEQ_LEN).remarks == ()


def test_draws_where_no_look_came_are_named() -> None:
    with pytest.warns(UserWarning) as told:
        losses(task_of(ways.ForMany), fp64(micro_batch=5), 1)
    named = r"random numbers of DropsForMany.forward .* whose owner is a guess"
    assert sum(bool(re.match(named, str(one.message))) for one in told) == 1, "once"


@pytest.mark.parametrize("family, changes, watched", [
    ("Llama", {}, False), ("Llama", {"attention_dropout": 0.1}, True), ("GPTNeoX", {}, True),
    ("GPTNeoX", {"hidden_dropout": 0.0}, False),
])  # fmt: skip
def test_a_model_of_transformers_is_watched_where_it_draws(family: str, changes: dict[str, Any], watched: bool) -> None:
    """Of a small classifier's step of 55 ms these calls took 2.5."""
    task, plan, seen = hf_task(family, **changes), plan_of(Layout()), list[bool]()
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    built.model.get_submodule(f"{built.model.base_model_prefix}.layers.0").register_forward_hook(
        lambda *_: seen.append(built.randomness.is_entered)
    )
    stream = BatchStream(task.data, task.seed, plan, 0, CPU)
    built.stepper.step(stream.at(0), 1e-3)
    assert seen and set(seen) == {watched}


def test_a_model_that_begins_to_draw_is_watched_from_then_on() -> None:
    """As where a callback turns dropout on: its first draws follow the micro-batch, which is told; others do not."""
    randomness = SampleRandomness(0, CPU, Survey(silent=True), strict=False)
    rows, entered = SampleRows(np.arange(4), 0), []
    with pytest.warns(UserWarning, match="random numbers of an operator"), randomness.during(rows):
        torch.rand(4)
        entered.append(randomness.is_entered)
    with randomness.during(rows):
        entered.append(randomness.is_entered)
    assert entered == [False, True]


@pytest.mark.parametrize("changes, watched", [({}, False), ({"objective": next_token_by_another_name}, True)])
def test_what_is_ours_is_not_watched_and_yet_cannot_draw(changes: dict[str, Any], watched: bool) -> None:
    """Each call of torch's would go through Python: 828 calls of a small decoder's step, 3 % of its time."""
    task, plan, seen = decoder_task(**changes), plan_of(Layout()), list[bool]()
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    built.model.layers[0].register_forward_hook(lambda *_: seen.append(built.randomness.is_entered))
    stream = BatchStream(task.data, task.seed, plan, 0, CPU)
    built.stepper.step(stream.at(0), 1e-3)
    assert seen and set(seen) == {watched}
    if watched:
        return

    def draw(*_: Any) -> None:
        torch.rand(3)

    built.model.layers[0].register_forward_hook(draw)
    with pytest.warns(UserWarning, match="follow the micro-batch"):
        built.stepper.step(stream.at(plan.batch_samples), 1e-3)


def test_a_proof_says_what_a_program_does_not_take_and_what_is_a_guess() -> None:
    world, source = world_here(), decoder_task().data
    odd = whole_batch(task_of(only_even), fp64(), world, source, SEQ_LEN, 1, {})
    assert "does not take every number of samples, RuntimeError: no batch of 3 rows, please" in odd.left_out
    with pytest.warns(UserWarning, match="owner is a guess"):
        guess = whole_batch(task_of(ways.ForMany), fp64(), world, source, SEQ_LEN, 1, {})
    assert not guess.equal, "some cuts have no more than three rows, and draw nothing"
    assert "DropsForMany.forward" in guess.first_difference.likely


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_a_recurrent_layer_that_drops_nothing_is_left_alone(
    kind: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its operators would pass through the interpreter."""
    mode, seen = SampleRandomness(3, CPU, Survey()), []
    monkeypatch.setattr(type(mode._operators), "__enter__", lambda self: seen.append(1) or self)
    monkeypatch.setattr(type(mode._operators), "__exit__", lambda self, *error: None)
    rows = torch.rand(2, 3, 4)
    given = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([3, 2]), batch_first=True) if packed else rows
    for dropout, training, drops in ((0.0, True, 0), (0.5, False, 0), (0.5, True, 1)):
        layer = kind(4, 4, num_layers=2, dropout=dropout, batch_first=True).train(training)
        seen.clear()
        with mode:
            layer(given)
        assert len(seen) == drops


class Follows(nn.Module):
    """A momentum encoder and a critic: weights that a forward pass moves and clamps in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both give."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.slow.parameters()), list(self.fast.parameters()), 0.5)
            self.slow.weight.T.mul_(0.9)
        self.fast.weight.data.clamp_(-0.1, 0.1)
        return self.fast(x) + self.slow(x)


def test_a_look_leaves_weights_that_the_program_moves_as_they_were() -> None:
    """Training began from weights that looks had moved, and the proof told a right program as another at the start."""
    model = Follows()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    survey(model, lambda model, batch: (model(batch).sum(), len(batch)), torch.ones(3, 4), CPU)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    model(torch.ones(1, 4))
    assert not torch.equal(model.slow.weight, before["slow.weight"])


class Remembers(nn.Module):
    """Measures its scale at the first call, and keeps all that it can in plain attributes, some of them deep."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls, self.has = nn.Parameter(torch.ones(())), 0, {"of": {"measured": False}}
        self.seen, self.teacher, self.mean = [], [nn.Linear(4, 4)], torch.zeros(())
        self.fresh = None  # such as a state that is carried on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled rows."""
        self.calls += 1
        self.seen.append(len(x))
        self.fresh, self.later = x.detach(), x.detach()
        with torch.no_grad():
            self.mean.add_(x.mean())
            self.teacher[0].weight.mul_(0.5)
            if not self.has["of"]["measured"]:
                self.scale.copy_(1 / x.max())
                self.has["of"]["measured"] = True
        return self.scale * x


def test_a_look_is_no_call_that_a_program_remembers() -> None:
    """Scales that a first call measures were measured on a look, put back, and never measured in training."""
    model, calls, steps = Remembers(), [0], 0
    teacher = model.teacher[0].weight.clone()

    def objective(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        nonlocal steps
        steps += 1
        calls[0] += 1
        return (model(batch) + torch.rand(len(batch), 1)).sum(), len(batch)

    seen = model.seen
    survey(model, objective, torch.full((3, 4), 2.0), CPU)
    assert (model.calls, model.seen, model.has, model.fresh) == (0, [], {"of": {"measured": False}}, None)
    assert model.seen is seen and not hasattr(model, "later") and (steps, calls) == (0, [0])
    assert torch.equal(model.teacher[0].weight, teacher) and float(model.mean) == 0
    objective(model, torch.full((1, 4), 2.0))
    assert float(model.scale.detach()) == 0.5 and (model.calls, steps) == (1, 1)


class FollowsByData(nn.Module):
    """A momentum encoder as MoCo's authors wrote it; and weights that are views of one tensor, of which one moves."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).requires_grad_(False)
        flat = torch.randn(2, 4, 4)
        self.first, self.second = nn.Parameter(flat[0]), nn.Parameter(flat[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what all of them give."""
        self.slow.weight.data = self.slow.weight.data * 0.5 + self.fast.weight.data * 0.5
        self.first.data.mul_(0.5)
        return self.fast(x) + self.slow(x) + x @ self.first + x @ self.second


def test_a_look_leaves_weights_whose_data_the_program_replaces_as_they_were() -> None:
    """No operator tells of new memory; and of weights in one tensor the last alone was put back."""
    model = FollowsByData()
    before = {name: (weight.clone(), weight.data_ptr()) for name, weight in model.named_parameters()}
    survey(model, lambda model, batch: (model(batch).sum(), len(batch)), torch.ones(3, 4), CPU)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name][0]) and weight.data_ptr() == before[name][1], name
