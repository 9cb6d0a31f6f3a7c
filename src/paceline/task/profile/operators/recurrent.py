"""Recurrent layers on fake tensors: all steps of a sequence at once, with the products and activations of each.

torch computes `nn.LSTM`, `nn.GRU` and `nn.RNN` in one fused operator a layer. On fake tensors it walks them step by
step instead, twenty operators a step: a trace would take as long as sequences are, and count calls that nobody makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Cell = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (of the input, of the state, cell state before)


class StepsAtOnce(TorchFunctionMode):
    """Gives recurrent layers outputs of the right shapes, which depend on their inputs and weights as they should."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cell = _CELLS.get(func)
        if cell is None or kwargs:
            return func(*args, **(kwargs or {}))
        if isinstance(args[3], bool):  # input, hx, weights, biases, layers, dropout, training, directions, batch first
            inputs, state, weights, _biases, layers, dropout, training, both, batch_first = args
            time = int(batch_first)
        else:  # packed: [steps of all samples, width], and how many samples have each step
            inputs, _, state, weights, _biases, layers, dropout, training, both = args
            time = None
        states = state if isinstance(state, tuple | list) else (state,)
        outputs, last = _stack(cell, inputs, states, weights, layers * (1 + both), 1 + both, time, dropout * training)
        return outputs, *last[: len(states)]


def _stack(
    cell: Cell, inputs: Tensor, states: Any, weights: Any, runs: int, directions: int, time: int | None, dropout: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of the last layer, and the last state and cell state of all, [runs, rows, width] each."""
    each = len(weights) // runs
    last: list[tuple[Tensor, Tensor]] = []
    for first in range(0, runs, directions):
        if first and dropout:
            inputs = torch.dropout(inputs, dropout, True)
        sides = []
        for number in range(first, first + directions):
            begun = [state[number] for state in states]
            out, inner = _run(cell, inputs, weights[number * each : (number + 1) * each], begun, time)
            rows = states[0].shape[1]
            last.append(tuple(x[:rows] if time is None else x.select(time, -1) for x in (out, inner)))  # type: ignore[arg-type]
            sides.append(out)
        inputs = torch.cat(sides, -1) if directions > 1 else sides[0]
    return inputs, [torch.stack(of_all) for of_all in zip(*last, strict=True)]


def _run(cell: Cell, inputs: Tensor, weights: Any, begun: Sequence[Tensor], time: int | None) -> tuple[Tensor, Tensor]:
    """Return states and cell states of one layer in one direction after every step; `begun` are the first ones."""
    of_input, of_state = weights[:2]
    biases = weights[2:4] if len(weights) >= 4 else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    given = F.linear(inputs, of_input, biases[0])
    before = _before(given, of_state.shape[1], begun[0], time)
    inner = _before(given, of_state.shape[0] // _GATES[cell], begun[-1], time)
    state, inner = cell(given, F.linear(before, of_state, biases[1]), inner)
    return (state if projection is None else F.linear(state, projection)), inner


def _before(given: Tensor, width: int, begun: Tensor, time: int | None) -> Tensor:
    """Return the state before each step. The first one's is followed back where something that is learnt has made it,
    as an encoder does."""
    shape = [*given.shape[:-1], width]
    if not begun.requires_grad:
        return given.new_empty(shape)
    first, axis = (begun, 0) if time is None else (begun.unsqueeze(time), time)
    shape[axis] -= first.shape[axis]
    return torch.cat([first, given.new_empty(shape)], axis)


def _lstm(given: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    entering, forgetting, new, leaving = (given + kept).chunk(4, -1)
    inner = forgetting.sigmoid() * before + entering.sigmoid() * new.tanh()
    return leaving.sigmoid() * inner.tanh(), inner


def _gru(given: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    (reset, update, new), (of_reset, of_update, of_new) = given.chunk(3, -1), kept.chunk(3, -1)
    candidate = (new + (reset + of_reset).sigmoid() * of_new).tanh()
    state = candidate + (update + of_update).sigmoid() * (before - candidate)
    return state, state


def _tanh(given: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    state = (given + kept).tanh()
    return state, state


def _relu(given: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    state = (given + kept).relu()
    return state, state


_GATES: dict[Cell, int] = {_lstm: 4, _gru: 3, _tanh: 1, _relu: 1}
_CELLS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
