"""Two ranks on one GPU: NCCL wants a device for each, so gloo sums tensors of the GPU. Copies need nothing else."""

from __future__ import annotations

from devices import on_every_device
from distributed import run_ranks
from rounding import assert_curves_close
from tests_shared import decoder_task, plan_of, run_steps

from paceline.run.numerics.invariants import check_agreement
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout

COPIES = Layout(dp_replicate=2)


def curve(device: str) -> list[tuple[float, float]]:
    world = join_world(device, threads=1)  # of two ranks on one GPU both see number 0
    stats, built = run_steps(decoder_task(), plan_of(COPIES, precision="fp64"), 3, world)
    assert {parameter.device for parameter in built.model.parameters()} == {world.device}
    check_agreement(built.model, {"the loss": stats[-1].loss}, 3, world, COPIES)
    return [(one.loss, one.grad_norm) for one in stats]


@on_every_device
def test_two_copies_on_one_device_are_one_device(device: str) -> None:
    stats, _ = run_steps(decoder_task(), plan_of(Layout(), micro_batch=13, precision="fp64"), 3)
    for rank in run_ranks(curve, 2, device, timeout_seconds=120):
        assert_curves_close(rank, [(one.loss, one.grad_norm) for one in stats])
