"""Outputs of a model's blocks in one step: how large activations are, and which units were zero for every sample.

Hooks are there for the steps that are measured alone, outside of what is compiled or computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.task.models.held import local_of

SILENT = (nn.ReLU, nn.ReLU6, nn.Threshold)  # functions of which a unit can give exactly nothing for every sample
OTHERS = "no block has an activation function that is a module and gives zeros (nn.ReLU)"


class ActivationWatch:
    """Adds up what the blocks of a model give, on the device, while its hooks are there."""

    def __init__(self, blocks: Mapping[str, nn.Module], device: torch.device) -> None:
        """`blocks` are the modules by their names."""
        self._blocks, self._device = dict(blocks), device
        self._silent = [
            (at, module)
            for at, block in enumerate(self._blocks.values())
            for module in block.modules()
            if isinstance(module, SILENT)
        ]
        self.counts = True  # whether the micro-batch that runs is one of the batch, and not a stand-in
        self._hooks: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._numbers: dict[int, int] = {}
        self._most: dict[int, list[torch.Tensor]] = {}
        self._reached: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Look from now on."""
        self.end()
        self._clear()
        for at, block in enumerate(self._blocks.values()):
            self._hooks.append(block.register_forward_hook(lambda _m, _i, out, at=at: self._given(at, out)))
        for number, (_, module) in enumerate(self._silent):
            self._hooks.append(module.register_forward_hook(lambda _m, _i, out, at=number: self._answered(at, out)))

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def sums(self) -> torch.Tensor:
        """Return for each block the sum of squares and the number of values; ranks' add up."""
        found = torch.zeros(2, len(self._blocks), dtype=torch.float64, device=self._device)
        for at, parts in self._sums.items():
            found[0, at] = torch.stack(parts).sum()
        for at, number in self._numbers.items():
            found[1, at] = number  # fills it: a tensor of the host would be copied, and waited for
        return found

    def most(self) -> torch.Tensor:
        """Return for each block the largest value, without its sign; of ranks the largest counts."""
        found = torch.zeros(len(self._blocks), dtype=torch.float64, device=self._device)
        for at, parts in self._most.items():
            found[at] = torch.stack(parts).amax()
        return found

    @property
    def silent_blocks(self) -> list[int]:
        """For each watched activation function the number of its block."""
        return [at for at, _ in self._silent]

    def widths(self) -> list[float]:
        """Return how many units each activation function has here; 0 for one that did not run."""
        return [float(len(self._reached[number])) if number in self._reached else 0.0
                for number in range(len(self._silent))]  # fmt: skip

    def reached(self, widths: Sequence[int], part: int, parts: int) -> torch.Tensor:
        """Return what each unit has given at most, one function after the other, in this rank's part of the units.

        `widths` are those of a part. Behind all units stands how many each function has here: where that is more, it
        ran for the first time since ranks agreed on `widths`, and its units are left out.
        """
        behind = sum(widths) * parts
        found = torch.zeros(behind + len(widths), dtype=torch.float64, device=self._device)
        start = 0
        for number, width in enumerate(widths):
            if (own := self._reached.get(number)) is not None:
                found[behind + number] = len(own)
                if len(own) <= width:
                    found[start + part * width : start + part * width + len(own)] = own
            start += width * parts
        return found

    @torch.no_grad()
    def _given(self, at: int, out: Any) -> None:
        values = _tensor(out)
        if not self.counts or values is None or values.ndim < 2 or not values.numel():
            return  # such as a loss that the model has added up itself
        self._sums.setdefault(at, []).append(torch.linalg.vector_norm(values, dtype=_wide(values)).double().square())
        self._numbers[at] = self._numbers.get(at, 0) + values.numel()
        self._most.setdefault(at, []).append(torch.linalg.vector_norm(values, float("inf")).double())

    @torch.no_grad()
    def _answered(self, number: int, out: Any) -> None:
        values = _tensor(out)
        if not self.counts or values is None or values.ndim < 2 or not values.numel():
            return
        units = 1 if values.ndim > 3 else values.ndim - 1  # channels of images
        most = values.abs().amax(dim=[axis for axis in range(values.ndim) if axis != units]).double()
        before = self._reached.get(number)
        self._reached[number] = most if before is None else torch.maximum(before, most)


def _tensor(out: Any) -> torch.Tensor | None:
    """Return the floating tensor that a module gives, or the first of several; of one in shards this rank's."""
    while isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, torch.Tensor) or not out.is_floating_point():
        return None
    here: torch.Tensor = local_of(out)
    return here.detach()


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
