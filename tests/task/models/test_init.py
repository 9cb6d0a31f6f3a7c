"""Initial weights: a pure function of seed and name, in every layout."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from decoders import tiny
from distributed import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.task.models.decoder import Decoder
from paceline.task.models.init import initial_tensor, initialise


def test_golden_values_are_frozen() -> None:
    """A change here changes every model that anyone has trained from a seed."""
    values = initial_tensor("layers.0.mlp.up_proj.weight", (2, 3), layers=4, seed=7).flatten()
    golden = [-0.0143273212, 0.0130954096, -0.00132818078, -0.0129160751, 0.00817886181, 0.0116773453]
    torch.testing.assert_close(values, torch.tensor(golden), rtol=1e-6, atol=0)


def test_std_and_norms() -> None:
    plain = initial_tensor("layers.0.self_attn.q_proj.weight", (400, 400), layers=8, seed=1)
    residual = initial_tensor("layers.0.self_attn.o_proj.weight", (400, 400), layers=8, seed=1)
    assert math.isclose(plain.std(), 0.02, rel_tol=0.02)
    assert math.isclose(residual.std(), 0.02 / 4, rel_tol=0.02)
    assert torch.equal(initial_tensor("layers.0.input_layernorm.weight", (5,), 8, 1), torch.ones(5))


def test_parameters_differ_by_name_and_seed_but_not_by_depth_of_the_model() -> None:
    shape = (8, 8)
    first = initial_tensor("layers.0.self_attn.q_proj.weight", shape, layers=2, seed=1)
    assert torch.equal(first, initial_tensor("layers.0.self_attn.q_proj.weight", shape, layers=9, seed=1))
    assert not torch.equal(first, initial_tensor("layers.1.self_attn.q_proj.weight", shape, layers=2, seed=1))
    assert not torch.equal(first, initial_tensor("layers.0.self_attn.q_proj.weight", shape, layers=2, seed=2))


def test_global_random_numbers_are_left_alone() -> None:
    model = Decoder(tiny())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    initialise(model, seed=1)
    assert torch.equal(torch.rand(1), expected)


def sharded_weights_and_loss() -> tuple[dict[str, torch.Tensor], float]:
    """Build on meta, shard, materialise, fill; return the gathered weights and a loss."""
    with torch.device("meta"):
        model = Decoder(tiny())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.layers, model]:
        fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    initialise(model, seed=1)
    tokens = torch.arange(24).reshape(2, 12)
    loss_sum, _ = model(tokens, labels=tokens)
    loss_sum.backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    return {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}, loss_sum.item()


def test_shards_hold_what_a_single_device_holds() -> None:
    model = Decoder(tiny())
    initialise(model, seed=1)
    tokens = torch.arange(24).reshape(2, 12)
    expected, _ = model(tokens, labels=tokens)
    for weights, loss_sum in run_ranks(sharded_weights_and_loss, 3):  # 3 does not divide the widths
        assert loss_sum == expected.item()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter), name
