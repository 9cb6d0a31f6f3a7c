"""Complex weights and buffers, and what the optimizer keeps for them, are saved and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from safetensors import safe_open
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint import (
    load_checkpoint,
    materialise_optimizer_state,
    read_index,
    read_manifest,
    save_checkpoint,
    training_state,
)
from paceline.checkpoint.export import WholeTensors
from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import Task

WIDTH = 8


class Filtered(nn.Module):
    """A language model that filters frequencies by complex weights, and turns features by a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.filter = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 0.7))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.filter * self.turn
        x = torch.view_as_real(turned).flatten(-2)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def task() -> Task:
    return decoder_task(model=Filtered, objective="next_token")


def steps(built: Assembled, plan: Plan, numbers: range) -> list[float]:
    world, source = world_here(), task().data
    stream = BatchStream(source, task().seed, plan, plan.layout.data_rank(world.rank), world.device)
    return [built.stepper.step(stream.at(step * plan.batch_samples), 1e-2).loss for step in numbers]


def made(plan: Plan) -> Assembled:
    return assemble(task(), plan, world_here(), task().data, SEQ_LEN)


def whole_state(built: Assembled) -> dict[str, Tensor]:
    state = training_state(built.model, built.optimizer)
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in state.items()}


def saved_and_resumed(folder: str, plan: Plan) -> dict[str, Any]:
    """Train two steps, save, train two more; and resume the saved ones in a fresh model for those two."""
    unbroken = made(plan)
    steps(unbroken, plan, range(2))
    saved = save_checkpoint(Path(folder), 2, training_state(unbroken.model, unbroken.optimizer), {}, keep_last=1)
    before = whole_state(unbroken)
    losses = steps(unbroken, plan, range(2, 4))
    resumed = made(plan)
    with torch.no_grad():
        for tensor in resumed.model.state_dict().values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    materialise_optimizer_state(resumed.optimizer)
    load_checkpoint(saved.path, training_state(resumed.model, resumed.optimizer))
    loaded = whole_state(resumed)
    again = steps(resumed, plan, range(2, 4))
    return {"path": str(saved.path), "before": before, "loaded": loaded, "losses": losses, "again": again,
            "after": (whole_state(unbroken), whole_state(resumed))}  # fmt: skip


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=2)], ids=str)
def test_complex_weights_resume_bit_for_bit(tmp_path: Path, layout: Layout, precision: str) -> None:
    plan = plan_of(layout, precision=precision)
    if layout.devices == 1:
        ranks = [saved_and_resumed(str(tmp_path), plan)]
    else:
        ranks = run_ranks(saved_and_resumed, layout.devices, str(tmp_path), plan)
    for rank in ranks:
        assert_same_bits(rank["loaded"], rank["before"])
        assert_same_bits(*rank["after"])
        assert rank["again"] == rank["losses"]
    kind = {"fp32": torch.complex64, "fp64": torch.complex128}[precision]
    before, names = ranks[0]["before"], ("model.filter", "model.turn", "optim.filter.exp_avg")
    assert {before[name].dtype for name in names} == {kind}
    assert all(float(before[name].imag.abs().sum()) > 0 for name in names), "there is something to lose"
    found = WholeTensors(Path(ranks[0]["path"]))
    assert torch.equal(found["filter"], before["model.filter"]), "read without a model too"


def test_the_plain_library_reads_what_is_written(tmp_path: Path) -> None:
    single = torch.randn(3, 2, dtype=torch.complex64)
    double = torch.randn(3, 2, dtype=torch.complex128)
    tensors = {"single": single, "double": double, "conjugate": single.conj(), "scalar": double[0, 0], "view": double.T}
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep_last=1).path
    index = read_index(path, read_manifest(path))
    assert (index["double"].dtype, index["double"].shape) == ("complex128", (3, 2)), "the record says what it is"
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as shard:
        assert torch.equal(shard.get_tensor("single"), single)
        assert torch.equal(torch.view_as_complex(shard.get_tensor("double")), double)
    targets = {name: torch.zeros_like(tensor).resolve_conj() for name, tensor in tensors.items()}
    load_checkpoint(path, targets)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor), name


def test_a_complex_tensor_is_not_loaded_as_a_pair_of_real_ones(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"x": torch.ones(2, dtype=torch.complex128)}, {}, keep_last=1).path
    assert json.loads((path / "tensors.json").read_text())["x"]["dtype"] == "complex128"
    with pytest.raises(Exception, match="is another tensor"):
        load_checkpoint(path, {"x": torch.ones(2, 2, dtype=torch.float64)})
