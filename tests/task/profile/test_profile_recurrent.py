"""Traced profiles of recurrent models: each layer is one pass over its sequences, whatever their length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.spec.profile import BlockProfile
from paceline.task.profile.traced import profile_module
from paceline.task.profile.tracing import quiet

WIDTH, ROWS, VOCAB = 16, 3, 32
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = getattr(nn, kind)(WIDTH, WIDTH, **{"batch_first": True, **options})
        outputs = (options.get("proj_size") or WIDTH) * (2 if options.get("bidirectional") else 1)  # type: ignore[operator]
        self.batch_first, self.head = self.layers.batch_first, nn.Linear(outputs, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x, last = self.layers(x if self.batch_first else x.transpose(0, 1))
        x = x if self.batch_first else x.transpose(0, 1)
        states = last if isinstance(last, tuple) else (last,)
        return self.head(x) + sum(state.mean() for state in states)


class StepByStep(nn.Module):
    """What an LSTM computes, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(2 * WIDTH, 4 * WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, outputs = self.embed(tokens), []
        state, inner = x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH)
        for step in x.unbind(1):
            entering, forgetting, new, leaving = self.cell(torch.cat([step, state], -1)).chunk(4, -1)
            inner = forgetting.sigmoid() * inner + entering.sigmoid() * new.tanh()
            state = leaving.sigmoid() * inner.tanh()
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


def following(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    labels = tokens[:, 1:]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.numel()


def profiled(model: nn.Module, length: int) -> BlockProfile:
    profile = profile_module(model, torch.zeros(ROWS, length + 1, dtype=torch.int64), following)
    (block,) = profile.blocks
    assert profile.source == "traced" and profile.note == ""
    return block


@pytest.mark.parametrize("options", [
    {}, {"num_layers": 2, "dropout": 0.1}, {"bidirectional": True}, {"bias": False}, {"batch_first": False}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", GATES)
def test_products_are_those_of_every_step_and_calls_do_not_grow_with_it(kind: str, options: dict[str, object]) -> None:
    short, long = (profiled(Recurrent(kind, **options), length) for length in (10, 80))
    sides, layers = (2 if options.get("bidirectional") else 1), int(str(options.get("num_layers", 1)))
    products = 2 * GATES[kind] * WIDTH * 2 * WIDTH * sides * layers + 2 * sides * WIDTH * VOCAB  # of one step
    assert (short.matmul_flops, long.matmul_flops) == (products * 10, products * 80)
    assert short.operators == long.operators < 60
    assert long.saved_elements == pytest.approx(8 * short.saved_elements, rel=0.1)


def test_a_projection_is_a_product_more() -> None:
    block = profiled(Recurrent("LSTM", proj_size=4), 10)
    gates = 2 * 4 * WIDTH * (WIDTH + 4)
    assert block.matmul_flops == 10 * (gates + 2 * WIDTH * 4 + 2 * 4 * VOCAB)


def test_it_keeps_what_a_walk_by_hand_keeps() -> None:
    at_once, by_hand = profiled(Recurrent("LSTM"), 40), profiled(StepByStep(), 40)
    assert at_once.matmul_flops == by_hand.matmul_flops
    assert at_once.saved_elements == pytest.approx(by_hand.saved_elements, rel=0.1)
    assert by_hand.operators > 10 * at_once.operators


def test_packed_sequences_are_priced_by_their_steps() -> None:
    class Packed(Recurrent):
        def forward(self, tokens: Tensor) -> Tensor:
            sizes = torch.full((tokens.shape[1],), tokens.shape[0])
            steps = self.embed(tokens).transpose(0, 1).flatten(0, 1)
            packed = nn.utils.rnn.PackedSequence(steps, sizes)
            return self.head(self.layers(packed)[0].data).unflatten(0, (tokens.shape[1], -1)).transpose(0, 1)

    packed, plain = profiled(Packed("GRU"), 20), profiled(Recurrent("GRU"), 20)
    assert packed.matmul_flops == plain.matmul_flops


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_gradients_reach_the_state_that_a_layer_begins_with(kind: str, is_packed: bool) -> None:
    """An encoder's, say: a program that asks for them was told that its outputs do not depend on it."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet(mode), torch.enable_grad():
        layer, steps = getattr(nn, kind)(WIDTH, WIDTH, num_layers=2, bidirectional=True), torch.empty(5, ROWS, WIDTH)
        made = torch.empty(4, ROWS, WIDTH, requires_grad=True)
        state = (made, made * 1) if kind == "LSTM" else made
        if is_packed:  # nn.LSTM itself would ask for the first size
            of_packed: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}[kind]
            given = steps.flatten(0, 1), torch.full((5,), ROWS), state, layer._flat_weights
            outputs = of_packed(*given, True, 2, 0.0, True, True)[0]
        else:
            outputs = layer(steps, state)[0]
        (gradient,) = torch.autograd.grad(outputs.sum(), made)
    assert outputs.shape[-1] == 2 * WIDTH and gradient.shape == made.shape
