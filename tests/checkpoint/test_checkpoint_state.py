"""Model and optimizer as named tensors: training goes on from a checkpoint bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import device_here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from paceline.checkpoint import (
    load_latest,
    materialise_optimizer_state,
    save_checkpoint,
    training_state,
)
from paceline.errors import ConfigError

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(AdamW, lr=0.1),
    "adamw fused": partial(AdamW, lr=0.1, fused=True),
    "adamw foreach": partial(AdamW, lr=0.1, foreach=True),
    "adamw amsgrad": partial(AdamW, lr=0.1, amsgrad=True),
    "adam": partial(Adam, lr=0.1, weight_decay=0.1),
    "sgd": partial(SGD, lr=0.1),
    "sgd momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd momentum fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
}


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a norm with buffers, and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.embed(tokens))))


def _train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step)).to(device_here())
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def _local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.items()
    }


def _assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        assert got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name]), name


def test_names_are_clean_and_each_tensor_is_there_once() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters())
    materialise_optimizer_state(optimizer)
    state = training_state(model, optimizer)
    trained = ["embed.weight", "norm.bias", "norm.weight"]
    kept = ["frozen.bias", "frozen.weight", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    moments = [f"optim.{name}.{key}" for name in trained for key in ("exp_avg", "exp_avg_sq", "step")]
    assert sorted(state) == sorted([f"model.{name}" for name in trained + kept] + moments)
    assert state["model.embed.weight"] is model.head.weight


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = set(training_state(Tied()))
    wrapped = Tied()
    wrapped.frozen = checkpoint_wrapper(wrapped.frozen)
    assert set(training_state(torch.compile(wrapped))) == plain


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_made_state_is_what_the_first_step_makes(name: str) -> None:
    results = []
    for ahead in (False, True):
        torch.manual_seed(0)
        model = Tied()
        optimizer = OPTIMIZERS[name](model.parameters())
        if ahead:
            before = _local(training_state(model))
            materialise_optimizer_state(optimizer)
            _assert_same(_local(training_state(model)), before)
        _train(model, optimizer, range(2))
        results.append(_local(training_state(model, optimizer)))
    _assert_same(*results)


def test_making_state_keeps_what_is_there() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters())
    _train(model, optimizer, range(1))
    before = _local(training_state(model, optimizer))
    materialise_optimizer_state(optimizer)
    _assert_same(_local(training_state(model, optimizer)), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    _train(model, optimizer, range(3))
    save_checkpoint(tmp_path, 3, training_state(model, optimizer), {}, keep_last=1)
    _train(model, optimizer, range(3, 6))

    torch.manual_seed(1)
    resumed = Tied()
    optimizer_again = OPTIMIZERS[name](resumed.parameters())
    materialise_optimizer_state(optimizer_again)
    assert load_latest(tmp_path, training_state(resumed, optimizer_again)) is not None
    _train(resumed, optimizer_again, range(3, 6))
    _assert_same(_local(training_state(resumed, optimizer_again)), _local(training_state(model, optimizer)))


class Plain(nn.Module):
    """Two layers whose rows do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(11, 7), nn.Linear(7, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens))


def _sharded(seed: int, shape: tuple[int, ...], fused: bool) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = Plain().to(device_here())
    mesh = init_device_mesh(device_here().type, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
    materialise_optimizer_state(optimizer)
    return model, optimizer


def _resume_sharded(root: str, shape: tuple[int, ...], fused: bool) -> None:
    """Train, save, train on; then load into another model, train on, and compare every bit on this rank."""
    model, optimizer = _sharded(0, shape, fused)
    _train(model, optimizer, range(2))
    save_checkpoint(Path(root), 2, training_state(model, optimizer), {}, keep_last=1)
    _train(model, optimizer, range(2, 4))
    resumed, optimizer_again = _sharded(1, shape, fused)
    assert load_latest(Path(root), training_state(resumed, optimizer_again)) is not None
    _train(resumed, optimizer_again, range(2, 4))
    _assert_same(_local(training_state(resumed, optimizer_again)), _local(training_state(model, optimizer)))


@pytest.mark.parametrize(("world_size", "shape", "fused"), [(2, (2,), False), (4, (4,), True), (4, (2, 2), True)])
def test_sharded_training_goes_on_bit_for_bit(
    tmp_path: Path, world_size: int, shape: tuple[int, ...], fused: bool
) -> None:
    run_ranks(_resume_sharded, world_size, str(tmp_path), shape, fused)
    # and what was sharded is whole in one process
    model = Plain()
    optimizer = AdamW(model.parameters(), lr=0.1)
    materialise_optimizer_state(optimizer)
    loaded = load_latest(tmp_path, training_state(model, optimizer))
    assert loaded is not None and optimizer.state[model.first.weight]["step"].item() == 2


def _replicated(root: str) -> dict[str, torch.Tensor]:
    model = nn.parallel.DistributedDataParallel(Plain().to(device_here()))
    optimizer = AdamW(model.parameters(), lr=0.1)
    _train(model, optimizer, range(1))
    save_checkpoint(Path(root), 1, training_state(model, optimizer), {}, keep_last=1)
    return _local(training_state(model, optimizer)) if dist.get_rank() == 0 else {}


def test_replicated_training_saves_under_the_same_names(tmp_path: Path) -> None:
    expected = run_ranks(_replicated, 2, str(tmp_path))[0]
    model = Plain()
    optimizer = AdamW(model.parameters(), lr=0.1)
    materialise_optimizer_state(optimizer)
    load_latest(tmp_path, training_state(model, optimizer))
    _assert_same(_local(training_state(model, optimizer)), expected)


def test_state_that_does_not_exist_yet_is_said(tmp_path: Path) -> None:
    model = Tied()
    optimizer = AdamW(model.parameters())
    materialise_optimizer_state(optimizer)
    save_checkpoint(tmp_path, 1, training_state(model, optimizer), {}, keep_last=1)
    with pytest.raises(ConfigError, match="materialise_optimizer_state"):
        load_latest(tmp_path, training_state(model, AdamW(model.parameters())))


def test_what_has_no_names_or_no_tensors_is_refused() -> None:
    model = Plain()
    with pytest.raises(ConfigError, match="the model does not"):
        stranger = AdamW(Plain().parameters())
        materialise_optimizer_state(stranger)
        training_state(model, stranger)
    with pytest.raises(ConfigError, match="cannot be made ahead"):
        materialise_optimizer_state(torch.optim.Adadelta(model.parameters()))
    table = nn.Embedding(5, 3, sparse=True)
    sparse = SparseAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    sparse.step()
    with pytest.raises(ConfigError, match="SparseAdam cannot be saved"):
        training_state(table, sparse)


def test_state_made_by_the_constructor_is_enough() -> None:
    model = Plain()
    optimizer = Adagrad(model.parameters())
    materialise_optimizer_state(optimizer)
    assert "optim.first.weight.sum" in training_state(model, optimizer)
