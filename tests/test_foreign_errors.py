"""What errors of torch and gloo say is known in one file; each of its answers is held against the real error."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import paceline
from paceline.foreign_errors import (
    is_of_functional_transforms,
    is_of_gloo,
    is_of_left_group,
    is_of_machine,
    is_of_memory_let_go,
    is_of_no_descriptor,
    is_of_no_gradient,
    is_of_shards,
    is_of_two_devices,
    says_no_memory,
    tells_of_lost_peer,
)
from paceline.run.process.groups import abort_groups
from paceline.run.record.recorder import is_echo

ANSWERS = (
    says_no_memory, is_of_gloo, is_of_two_devices, is_of_memory_let_go, is_of_no_gradient, is_of_shards,
    is_of_functional_transforms,
)  # fmt: skip
ROOT = Path(paceline.__file__).parent


def mixed() -> None:
    torch.ones(2) + torch.ones(2, device="meta")


def let_go() -> None:
    weight = torch.ones(2, 3)
    weight.untyped_storage().resize_(0)  # as FSDP2 does where a block's weights are gathered no more
    weight.as_strided((3, 2), (2, 1))


def without_gradient() -> None:
    torch.ones(()).backward()


def watched_transform() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        torch.func.grad(lambda x: x.tanh().sum())(torch.ones(2, requires_grad=True))


def without_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def peer_dies() -> str:
    """Return what a rank is told whose peer ends without a word."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        (mixed, is_of_two_devices),
        (let_go, is_of_memory_let_go),
        (without_gradient, is_of_no_gradient),
        (without_memory, says_no_memory),
        (watched_transform, is_of_functional_transforms),
    ],
)
def test_each_error_of_torch_has_one_answer(how: object, answer: object) -> None:
    with pytest.raises(RuntimeError) as raised:
        how()  # type: ignore[operator]
    assert [each for each in ANSWERS if each(raised.value)] == [answer]
    assert not any(each(ValueError(str(raised.value))) for each in ANSWERS), "torch raises a RuntimeError"


def met_shards() -> list[str]:
    """Return what torch says of operators that are given shards: and a plain tensor, without a rule, with none that
    fits."""
    shard, told = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)]), list[str]()
    for wrong in (
        lambda: shard + torch.ones(2, 2),
        lambda: torch.nn.functional.unfold(shard[None, None], 1),
        lambda: torch.bincount(shard.long().flatten()),
    ):
        with pytest.raises(RuntimeError) as raised:
            wrong()
        told.append(str(raised.value))
    return told


def test_what_operators_say_of_shards() -> None:
    for words in run_ranks(met_shards, 1)[0]:
        assert [each for each in ANSWERS if each(RuntimeError(words))] == [is_of_shards], words


def test_what_kernels_say_of_two_devices() -> None:
    """As CUDA's do, which this machine has not."""
    for words in (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "Expected all tensors to be on the same device, but got index is on cpu, different from other ten",
        "Unhandled FakeTensor Device Propagation for aten.add.Tensor, found two different devices cuda:0",
    ):
        assert [each for each in ANSWERS if each(RuntimeError(words))] == [is_of_two_devices]


def test_a_peer_that_has_gone_is_an_echo_and_a_path_with_gloo_in_it_is_none() -> None:
    """A failing rank whose own error only has the four letters in it was taken for an echo, and blamed was another."""
    told, _ = run_ranks(peer_dies, 2, may_die=[1])
    assert is_of_gloo(RuntimeError(told)) and is_echo(RuntimeError(told)) and tells_of_lost_peer(told), told
    for own in ("cannot open /data/igloo/rows.bin", "gloo is not what this model wants", "Igloo/rows.h5:3 is damaged"):
        assert not is_of_gloo(RuntimeError(own)) and not is_echo(RuntimeError(own)), own
    assert not is_echo(None) and not is_echo(KeyboardInterrupt())


def test_a_store_that_could_not_be_opened_tells_of_no_lost_peer(tmp_path: Path) -> None:
    """What torch says of it has the type of a store whose server has gone."""
    store, limits = dist.FileStore(str(tmp_path / "store"), -1), resource.getrlimit(resource.RLIMIT_NOFILE)
    store.set("a", "b")
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(dist.DistError) as raised:
            store.get("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert is_of_no_descriptor(raised.value) and not is_echo(raised.value)
    assert is_echo(dist.DistNetworkError("Connection reset by peer"))


def calls_group_that_was_left() -> str:
    """Return what torch says where a thread that saves goes on in a group that its process has ended."""
    group = dist.new_group()
    abort_groups()
    with pytest.raises(ValueError, match="group") as raised:
        dist.get_backend(group)
    assert is_echo(raised.value) and is_of_left_group(raised.value)
    return str(raised.value)


def test_a_world_that_was_left_is_no_failure_of_what_goes_on_beside_it() -> None:
    """A save beside training that a growing world had given up was told as failed, and counted among the failures."""
    for told in run_ranks(calls_group_that_was_left, 2):
        assert not any(each(ValueError(told)) or each(RuntimeError(told)) for each in ANSWERS)
    assert not is_echo(ValueError("2 is not a valid rank"))


def test_no_other_file_reads_the_words_of_an_error() -> None:
    """Words change with a version of torch: one file is then held against it, and not all of the package."""
    reads = re.compile(
        r"\bin (?:str|repr)\((?:\w*error|\w*failure|raised|silence)\)|\.(?:search|match)\(str\(\w*error\)\)"
    )
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if reads.search(path.read_text("utf-8"))}
    assert found == {"foreign_errors.py"}


def test_errors_of_machines_are_those_of_memory_peers_and_devices() -> None:
    """What a user's program raises, in whatever words, is none of them."""
    gone = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    told = [torch.OutOfMemoryError("CUDA out of memory"), dist.DistBackendError("NCCL error")]
    told += [RuntimeError("std::bad_alloc"), RuntimeError(gone)]
    assert all(map(is_of_machine, told))
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not any(map(is_of_machine, (raised.value, ValueError("out of memory"), AttributeError("gloo"))))
