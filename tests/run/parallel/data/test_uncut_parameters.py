"""Parameters that every rank holds whole: their gradients are sums over the ranks that reached them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed import run_kept
from tests_shared import device_here
from torch import nn

from paceline.run.parallel.data.uncut_parameters import WholeGradients

DTYPES = (torch.float32, torch.float64, torch.complex64)


class Inner:
    """Gradients of all other parameters, of which there are none."""

    settled = 0

    def zero(self) -> None:
        """Nothing is to be forgotten."""

    def finish(self) -> None:
        """Nothing is to be summed."""

    def unreached(self) -> int:
        return 0

    def settle(self) -> None:
        self.settled += 1


def summed(reached_by: dict[str, tuple[int, ...]]) -> dict[str, object]:
    """Return what a rank has of parameters by their names, which the ranks of `reached_by` reach."""
    rank = dist.get_rank()
    held = {f"{name} {dtype}": nn.Parameter(torch.ones(shape, dtype=dtype, device=device_here()))
            for dtype in DTYPES for name, shape in (("scalar", ()), ("empty", (0, 3)), ("lone", ()))}  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    inner = Inner()
    whole = WholeGradients(inner, tuple(held.values()), (group,))
    found: dict[str, object] = {}
    for step in (1, 2):  # what is known of a step is forgotten in the next
        whole.zero()
        for at, (name, parameter) in enumerate(held.items()):
            if rank in reached_by[name.split()[0]]:
                parameter.grad = torch.full_like(parameter, step * (10.0**rank) * (at + 1))
        whole.finish()
        missed = torch.tensor(whole.unreached(), device=device_here())
        dist.all_reduce(missed)
        if missed:
            whole.settle()
        found[f"settled {step}"] = inner.settled
        found |= {f"{name} {step}": None if p.grad is None else p.grad.tolist() for name, p in held.items()}
    return found


def expected(reached_by: dict[str, tuple[int, ...]]) -> dict[str, object]:
    names = [f"{name} {dtype}" for dtype in DTYPES for name in ("scalar", "empty", "lone")]
    found: dict[str, object] = {}
    for step in (1, 2):
        found[f"settled {step}"] = step * any(len(ranks) < 2 for ranks in reached_by.values())
        for at, name in enumerate(names):
            ranks = reached_by[name.split()[0]]
            total = sum(step * 10.0**rank * (at + 1) for rank in ranks)
            found[f"{name} {step}"] = None if not ranks else [] if name.startswith("empty") else total
    return found


def test_gradients_are_sums_over_the_ranks_that_reached_a_parameter() -> None:
    for reached_by in (
        {"scalar": (0, 1), "empty": (0, 1), "lone": (0, 1)},
        {"scalar": (0, 1), "empty": (0, 1), "lone": (1,)},
        {"scalar": (0, 1), "empty": (), "lone": ()},
    ):
        assert run_kept(summed, 2, reached_by) == [expected(reached_by)] * 2
