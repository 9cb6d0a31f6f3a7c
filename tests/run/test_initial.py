"""Models of factories never lie whole on every rank where a plan spreads them, and begin with the very same weights."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from safetensors.torch import save_file
from tests_huggingface import Rows, causal
from tests_shared import VOCAB, decoder_task, plan_of, world_here
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from paceline.checkpoint.fingerprint import local_part
from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.initial import _check_alike, start_model
from paceline.spec.layout import Layout
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.beside import arrays_beside, refuse_other_values, values_beside
from paceline.task.models.build import build_model
from paceline.task.models.unfilled import build_unfilled
from paceline.task.plain_names import named_parameters

SHAPE: dict[str, Any] = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1024,
}  # fmt: skip
# A rank of four holds a quarter, and while it is filled a weight or two; what a look computes is small beside it.
MOST = 0.5


class Offset(nn.Module):
    """Has what a constructor makes and no file holds: a buffer that is not kept, beside one that is."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.register_buffer("offset", torch.linspace(-1, 1, width), persistent=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.head.to(torch.bfloat16)  # as a factory may leave a part, and both ends of the tie with it

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens).float() + self.offset
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.head(x.to(self.head.weight.dtype)).float()


def llama() -> nn.Module:
    return causal("Llama", tie_word_embeddings=True, **SHAPE)


def mixtral() -> nn.Module:
    return causal("Mixtral", **SHAPE)


def drawn() -> nn.Module:
    """Return a model with a buffer that is drawn and in no file."""
    model = Offset()
    model.offset = torch.randn(12)
    return model


def drawn_in_a_file() -> nn.Module:
    return drawn()


def reads_its_weights() -> nn.Module:
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))
    model.paceline_norm = float(model[1].weight.norm())  # type: ignore[assignment]
    return model


class Views(nn.Module):
    """Two of its weights are one memory: a module of its own would take each for a weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(VOCAB, 8)
        self.embed, self.first = nn.Embedding(VOCAB, 8), nn.Parameter(table[:2])
        self.head = nn.Parameter(table)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.embed(tokens) @ self.head.T + self.first.sum()


def task_of(factory: Any, weights: str = "") -> Task:
    name = f"{factory.__module__}:{factory.__qualname__}"
    model = ModelSpec(name, weights=weights) if weights else factory
    return decoder_task(model=model, data=Rows(8))


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: tensor.detach().to(torch.float32) for name, tensor in held.items()}


def unlike(model: nn.Module, expected: dict[str, Tensor]) -> list[str]:
    """Return the names of weights and buffers of which this rank's part is not, bit for bit, what it is to be."""
    found: list[str] = []
    held: dict[str, Tensor] = dict(named_parameters(model, every=True)) | dict(model.named_buffers())
    for name, tensor in held.items():
        local, places = local_part(tensor.detach())
        for offsets, sizes in places:
            part = expected[name][tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            found += [] if torch.equal(local, part) else [name]
    return found


def peak_bytes(prof: Any, mapped: int) -> int:
    """Return the most that was allocated at one moment, beyond what there was before.

    Files that are mapped into memory, of at least `mapped` bytes, are told like memory and take none.
    """
    told = [event for event in prof.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in told if abs(event.nbytes()) < mapped]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def assembled(cases: list[tuple[Task, Layout]]) -> list[tuple[list[str], float]]:
    """Return for each case the weights that are not as on one device, and the peak of memory over the whole model's."""
    world = world_here()
    found = []
    for task, layout in cases:
        plan = plan_of(layout, micro_batch=1)
        start_model(task, plan, world, task.data, 8)  # imports, and caches of torch
        with profile(profile_memory=True) as prof:
            built = assemble(task, plan, world, task.data, 8)
        alone = build_model(task.model, 0, 8, task.seed)
        expected, whole = whole_state(alone), sum(parameter.nbytes for parameter in alone.parameters())
        found.append((unlike(built.model, expected), peak_bytes(prof, mapped=whole) / whole))
    return found


LAYOUTS = [Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2)]


def test_every_rank_holds_its_part_alone_and_it_is_what_one_device_would_hold(tmp_path: Path) -> None:
    stored = dict(llama().state_dict())
    del stored["lm_head.weight"]  # tied
    save_file({name: tensor.clone() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    cases = [(task_of(llama, weights), layout) for layout in LAYOUTS for weights in ("", str(tmp_path))]
    cases += [(task_of(mixtral), Layout(dp_shard=4, ep=2))]
    results = run_ranks(assembled, 4, cases)
    for rank, of_rank in enumerate(results):
        for (task, layout), (wrong, peak) in zip(cases, of_rank, strict=True):
            assert not wrong, (rank, str(layout), wrong)
            sends = rank == 0 and not isinstance(task.model, ModelSpec)  # builds it whole, and sends it
            assert peak < (1.0 + MOST if sends else MOST), (rank, str(layout), task.model, peak)


def started(tasks: list[Task]) -> list[tuple[str, list[str], list[str]]]:
    """Return for each task how its model starts over two shards, what is said of that, and what is not as expected."""
    world, plan = world_here(), plan_of(Layout(dp_shard=2))
    found = []
    for task in tasks:
        begun = start_model(task, plan, world, task.data, 8)
        built = assemble(task, plan, world, task.data, 8)
        given = isinstance(task.model, nn.Module)
        wrong = [] if given else unlike(built.model, whole_state(build_model(task.model, 0, 8, task.seed)))
        found.append((type(begun).__name__, [line for line in built.remarks if "every rank" in line], wrong))
    return found


def test_buffers_ties_and_roundings_are_as_ever_and_what_reads_its_weights_is_whole_with_a_word(tmp_path: Path) -> None:
    stored = {name: torch.randn(tensor.shape) for name, tensor in Offset().state_dict().items()}
    del stored["head.weight"]
    save_file(stored, tmp_path / "offset.safetensors")
    weights = str(tmp_path / "offset.safetensors")
    tasks = [task_of(Offset), task_of(Offset, weights), task_of(drawn), task_of(drawn_in_a_file, weights)]
    tasks += [task_of(reads_its_weights), dataclasses.replace(task_of(Offset), model=Offset())]
    for of_rank in run_ranks(started, 2, tasks):
        assert [kind for kind, _, _ in of_rank] == ["LateModel"] * 3 + ["WholeModel"] * 3
        assert not any(wrong for _, _, wrong in of_rank), of_rank
        remarks = [said for _, said, _ in of_rank]
        assert not any(remarks[:3]) and remarks[5] == []
        assert "draws random numbers, perhaps for 'offset'" in remarks[3][0]
        assert "its factory needs the values of weights" in remarks[4][0]


def test_weights_that_are_views_of_one_memory_are_not_taken_for_two() -> None:
    assert build_unfilled(Offset, 0).because == ""
    assert build_unfilled(Views, 0).because == "some of its parameters are views of others"


class Beside(Offset):
    """Has values in plain attributes: numbers of every kind, and a list of weights, which are none."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.weights = [self.embed.weight]
        self.table = {"places": [torch.arange(3), np.arange(3)], "rate": 0.5}
        if kind == "drawn":
            self.projection = torch.randn(3)
        if kind == "chosen":
            self.order = [random.random() for _ in range(3)]
        if kind == "copied":
            self.anchor = self.embed.weight.detach().clone()
        if kind == "into a weight":
            self.drawn = nn.Parameter(torch.randn(3))


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("", ""),
        ("into a weight", ""),
        ("drawn", "its factory draws random numbers for 'projection', which is neither weight nor buffer"),
        ("chosen", "its factory draws random numbers for 'order', which is neither weight nor buffer"),
        ("copied", "its factory takes values of weights for 'anchor', which is neither weight nor buffer"),
    ],
)
def test_what_a_factory_makes_beside_weights_is_what_one_device_has(kind: str, because: str) -> None:
    found = build_unfilled(functools.partial(Beside, kind), 0)
    assert found.because == because and (found.model is None) == bool(because)
    if found.model is not None:
        assert values_beside(found.model) == values_beside(build_model(functools.partial(Beside, kind), 0, 8, 0))


def test_values_beside_weights_that_differ_by_rank_are_named() -> None:
    alike, changed = Beside("drawn"), Beside("drawn")
    changed.projection = alike.projection.clone()
    changed.table["places"][1] = alike.table["places"][1].copy()
    changed.made_at = 7.0  # a number alone may be a rank's own
    refuse_other_values([arrays_beside(alike), arrays_beside(changed)])
    for change in (lambda: changed.projection.add_(1), lambda: changed.table.update(rate=0.25)):
        before = arrays_beside(changed)
        change()
        with pytest.raises(ConfigError, match="is another on every rank") as refused:
            refuse_other_values([before, arrays_beside(changed)])
        assert "neither a parameter nor a buffer" in refused.value.because


def made_by_a_rank() -> str:
    """Return what is said of a module that each rank makes with its own seed, and of one of the same seed."""
    world, said = world_here(), []
    for seed in (world.rank, 0):
        torch.manual_seed(seed)
        task = dataclasses.replace(task_of(Offset), model=Beside("drawn"))
        try:
            start_model(task, plan_of(Layout(dp_replicate=2)), world, task.data, 8)
        except ConfigError as error:
            said.append(error.what)
    return "; ".join(said)


def test_ranks_that_make_other_models_do_not_train() -> None:
    assert run_ranks(made_by_a_rank, 2) == ["'projection' of the model is another on every rank"] * 2


class Unordered(Offset):
    """Makes its parts in the order of a set, which is another in every process that hashes texts its own way."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("left", "right") if dist.get_rank() == 0 else ("right", "left"):
            self.register_module(name, nn.Linear(12, 12))


def made_in_the_order_of_a_rank() -> list[str]:
    """Return what is said where ranks make the same weights in other orders: copies, and shards."""
    world, said = world_here(), []
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        task = task_of(Unordered)
        with pytest.raises(ConfigError) as refused:
            start_model(task, plan_of(layout), world, task.data, 8)
        said.append(f"{refused.value.what}: {refused.value.because}")
    return said


def test_ranks_that_make_weights_in_other_orders_do_not_train() -> None:
    for of_rank in run_ranks(made_in_the_order_of_a_rank, 2):
        assert len(of_rank) == 2
        assert all(
            "weight 5 of the model is 'left.weight' on rank 0 and 'right.weight' on rank 1" in a for a in of_rank
        )


def turned() -> nn.Module:
    """Return a model with orthogonal weights that are not square: torch completes them to square buffers."""
    model = Offset()
    orthogonal(model.blocks[0])
    model.blocks[1] = orthogonal(nn.Linear(12, 24))
    model.after = nn.Linear(24, 12)
    return model


def oblong() -> nn.Module:
    """Return an orthogonal weight that is not square alone: nothing of it needs a value that torch asks for."""
    return orthogonal(nn.Linear(VOCAB, 12))


def test_what_a_parametrisation_makes_of_weights_is_not_left_out_where_they_have_no_values() -> None:
    assert list(dict(oblong().named_buffers())) == ["parametrizations.weight.0.base"]
    found = build_unfilled(oblong, 0)
    assert found.model is None and found.because == (
        "the parametrisation 'parametrizations.weight.0' computes buffers from weights"
    )
    assert build_unfilled(turned, 0).model is None
    assert build_unfilled(lambda: weight_norm(nn.Linear(4, 3)), 0).because == ""


def test_a_factory_that_builds_another_model_each_time_is_named_with_what_differs() -> None:
    with pytest.raises(ConfigError) as refused:
        _check_alike(turned, {"0.weight": ((7, 5), "fp32")}, {"0.weight": ((7, 6), "fp32")})
    text = str(refused.value)
    assert "turned" in text and "'0.weight'" in text and "(7, 5)" in text and "(7, 6)" in text
    _check_alike(turned, {"a": 1}, {"a": 1})
