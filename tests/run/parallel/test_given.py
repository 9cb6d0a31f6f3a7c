"""What a unit changes in a list, a dictionary or a dataclass that it is given, its caller sees, whatever copies it."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept
from programs import CLASSES, WIDTH, Block, Stack, assert_like_plain, cross_entropy, laid_out, plain_loop
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from paceline.errors import NeedsWholeWeights
from paceline.run.numerics.precision import cast_floats
from paceline.spec.layout import Layout


@dataclass
class State:
    """What goes from block to block."""

    x: Tensor
    losses: list[Tensor] = field(default_factory=list)
    seen: int = 0


class Sides(Block):
    """A block that leaves what it finds in the containers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, found: list[Tensor], *, named: dict[str, Any], state: State) -> Tensor:
        """Return hidden states that are made of all that was found before."""
        found.append(self.side(x))
        named["inner"]["last"] = found[-1] * 0.5
        state.losses.append(found[-1].square().mean(1))
        state.seen, state.x = state.seen + 1, state.x + found[-1]
        return super().forward(sum(found, x)) + named["inner"]["last"]


class Found(Stack):
    """Blocks that append to lists, change dictionaries and dataclasses; the model adds its outputs to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sides() for _ in range(3))

    def forward(self, batch: dict[str, Tensor]) -> None:
        """Add logits and penalties to the batch, and take its kinds out."""
        x = self.stem(batch["x"])
        found, named, state = [x], {"inner": {}}, State(x)
        for block in self.blocks:
            x = block(x, found, named=named, state=state)
        assert state.seen == len(state.losses) == len(self.blocks)
        batch["penalties"] = torch.stack(state.losses).sum(0)
        batch["logits"] = self.head(x + state.x + named["inner"]["last"] + sum(found))
        batch.pop("kind")


def of_batch(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of what the model has added to its batch."""
    batch = dict(batch)
    model(batch)
    assert "kind" not in batch
    loss = F.cross_entropy(batch["logits"], batch["labels"], reduction="sum") + batch["penalties"].sum()
    return loss, torch.tensor(len(batch["labels"]))


@pytest.mark.parametrize(
    ("layout", "zero", "recompute"),
    [(Layout(), 3, "full"), (Layout(dp_replicate=2), 3, "full"), (Layout(dp_shard=2), 3, "none"),
     (Layout(dp_shard=2), 1, "none"), (Layout(dp_shard=2), 3, "full")],
)  # fmt: skip
def test_callers_see_what_blocks_change(layout: Layout, zero: int, recompute: str) -> None:
    plain = plain_loop(Found, of_batch)
    trained = functools.partial(laid_out, recompute=recompute)
    ranks = run_kept(trained, layout.devices, Found, of_batch, layout, zero)
    assert_like_plain(ranks, plain)


@pytest.mark.parametrize(("layout", "zero"), [(Layout(), 3), (Layout(dp_replicate=2), 3), (Layout(dp_shard=2), 3)])
def test_callers_see_it_in_bf16_too(layout: Layout, zero: int) -> None:
    plain, _ = plain_loop(Found, of_batch)
    in_bf16 = functools.partial(laid_out, precision="bf16")
    for losses, _ in run_kept(in_bf16, layout.devices, Found, of_batch, layout, zero):
        assert losses == pytest.approx(plain, rel=1e-2)  # three digits; without the penalties a tenth is missing


class Handed(Stack):
    """A model that is handed a dataclass of numbers in fp32, which no unit's weights are in."""

    def forward(self, state: State) -> Tensor:
        """Return logits."""
        return super().forward(state.x)


def of_record(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of a model that takes a dataclass."""
    logits = model(State(batch["x"]))
    assert logits.shape[1] == CLASSES
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), torch.tensor(len(logits))


def test_numbers_in_a_dataclass_are_inputs_too() -> None:
    """FSDP2 casts them, so one device and copies do."""
    plain, _ = plain_loop(Handed, of_record)
    shards = run_kept(functools.partial(laid_out, precision="bf16"), 2, Handed, of_record, Layout(dp_shard=2))
    ((one, _),) = run_kept(functools.partial(laid_out, precision="bf16"), 1, Handed, of_record, Layout())
    assert one == pytest.approx(plain, rel=1e-2)
    assert shards[0][0][0] == pytest.approx(one[0], rel=1e-6)


class Own:
    """What hands hidden states on, in a class that torch knows nothing of."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class OwnBlock(Block):
    def forward(self, state: Own) -> Own:
        """Return the next state."""
        return Own(super().forward(state.x))


class InOwnClass(Stack):
    """Blocks that hand each other a class of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        state = Own(self.stem(x))
        for block in self.blocks:
            state = block(state)
        return self.head(state.x)


class WholeInOwnClass(InOwnClass):
    needs_whole_weights = True


def test_a_class_of_ones_own_asks_for_whole_weights() -> None:
    plain = plain_loop(InOwnClass, cross_entropy)
    assert_like_plain(run_kept(laid_out, 2, WholeInOwnClass, cross_entropy, Layout(dp_shard=2)), plain)
    with pytest.raises(NeedsWholeWeights, match="class of the program's own"):
        run_kept(laid_out, 2, InOwnClass, cross_entropy, Layout(dp_shard=2))


@dataclass
class Ring:
    """A record that holds itself."""

    x: Tensor
    first: Any = None


class OnRing(Stack):
    """A model that is handed a record which holds itself, and leaves its logits there."""

    def forward(self, ring: Ring) -> None:
        """Leave the logits."""
        assert ring.first is ring
        ring.x = super().forward(ring.x)


def of_ring(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of what the model has left in the record."""
    ring = Ring(batch["x"])
    ring.first = ring
    model(ring)
    return F.cross_entropy(ring.x, batch["labels"], reduction="sum"), torch.tensor(len(ring.x))


def test_a_record_that_holds_itself_is_given_once() -> None:
    plain, _ = plain_loop(OnRing, of_ring)
    for precision, recompute in (("bf16", "none"), ("fp32", "full")):
        losses, _ = laid_out(OnRing, of_ring, Layout(), precision=precision, recompute=recompute)
        assert losses == pytest.approx(plain, rel=1e-2 if precision == "bf16" else 1e-6)


def by_forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what `of_batch` does by calling the model's `forward` itself, around its hooks."""
    return of_batch(model.forward, batch)  # type: ignore[arg-type]


def test_who_calls_forward_itself_sees_what_it_changes() -> None:
    assert_like_plain([laid_out(Found, by_forward, Layout(), recompute="full")], plain_loop(Found, of_batch))


class Leaves(Block):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        """Return hidden states, and leave others in a list."""
        found.append(x * 0.5)
        return super().forward(x)


class MadeAgain(Stack):
    """A model that makes its blocks again by a checkpoint of its own, with a list that it makes within it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(self._with_found, block, x, use_reentrant=False)
        return self.head(x)

    def _with_found(self, block: nn.Module, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        x = block(x, found)
        return x * torch.stack(found).sum(0)


def test_a_checkpoint_of_the_model_s_own_finds_the_same_when_it_is_made_again() -> None:
    plain, _ = plain_loop(MadeAgain, cross_entropy)
    losses, _ = laid_out(MadeAgain, cross_entropy, Layout(), precision="bf16")
    assert losses == pytest.approx(plain, rel=1e-2)


class Kinds(dict):
    """A dictionary of the program's own class."""


class Sorted(Block):
    """A block that is given containers of many classes, with numbers in fp32 among them."""

    def forward(
        self,
        x: Tensor,
        found: defaultdict[str, list[Tensor]],
        own: Kinds,
        *,
        last: deque[Tensor],
        packed: PackedSequence,
    ) -> Tensor:
        """Return hidden states that are made of what is in all of them."""
        assert type(found) is defaultdict and type(own) is Kinds and type(last) is deque and last.maxlen == 2
        assert {own["shift"].dtype, last[0].dtype, packed.data.dtype} == {x.dtype}
        found[f"block {len(found)}"].append(self.linear(packed.data)[: len(x)])
        own["seen"] = own.get("seen", 0) + 1
        last.append(x)
        return super().forward(x + own["shift"] + last[0]) + sum(each for some in found.values() for each in some)


class InManyClasses(Stack):
    """A model whose blocks are given a defaultdict, a dictionary of their own class, a deque and a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sorted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        found: defaultdict[str, list[Tensor]] = defaultdict(list)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        half = torch.full((WIDTH,), 0.5, dtype=dtype, device=x.device)
        own, last, packed = Kinds(shift=half), deque([half, half], maxlen=2), _packed(x.new_ones(len(x), 2, WIDTH))
        packed = cast_floats(packed, half.dtype)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, found, own, last=last, packed=packed)
        assert own["seen"] == len(found) == len(self.blocks)
        return self.head(x + last[-1])


def _packed(steps: Tensor) -> PackedSequence:
    """Return rows [rows, steps, width] of lengths 1 and 2 packed."""
    lengths = 1 + torch.arange(len(steps)) % 2
    return pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize(
    ("layout", "zero", "recompute"),
    [(Layout(), 3, "none"), (Layout(dp_replicate=2), 3, "full"), (Layout(dp_shard=2), 3, "none"),
     (Layout(dp_shard=2), 1, "none"), (Layout(dp_shard=2), 3, "full")],
)  # fmt: skip
def test_containers_keep_their_classes_in_bf16(layout: Layout, zero: int, recompute: str) -> None:
    plain, _ = plain_loop(InManyClasses, cross_entropy)
    in_bf16 = functools.partial(laid_out, precision="bf16", recompute=recompute)
    for losses, _ in run_kept(in_bf16, layout.devices, InManyClasses, cross_entropy, layout, zero):
        assert losses == pytest.approx(plain, rel=2e-2)
    assert_like_plain([laid_out(InManyClasses, cross_entropy, Layout())], plain_loop(InManyClasses, cross_entropy))


class OnPacked(nn.Module):
    """A recurrent model that is given packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, packed: PackedSequence) -> Tensor:
        """Return logits."""
        return self.head(self.body(packed)[1][0][-1])


def of_packed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of rows as sequences of unequal lengths."""
    lengths = 2 + batch["labels"].cpu()
    packed = pack_padded_sequence(batch["x"].unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
    return F.cross_entropy(model(packed), batch["labels"], reduction="sum"), torch.tensor(len(lengths))


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_packed_sequences_are_inputs_in_any_precision(layout: Layout) -> None:
    plain = plain_loop(OnPacked, of_packed)
    assert_like_plain(run_kept(laid_out, layout.devices, OnPacked, of_packed, layout), plain)
    in_bf16 = functools.partial(laid_out, precision="bf16")
    for losses, _ in run_kept(in_bf16, layout.devices, OnPacked, of_packed, layout):
        assert losses == pytest.approx(plain[0], rel=1e-2)


def test_a_packed_sequence_of_a_batch_is_cast() -> None:
    packed = _packed(torch.ones(3, 2, 1))
    cast = cast_floats({"steps": packed, "own": Kinds(x=torch.ones(2))}, torch.float64)
    assert type(cast["steps"]) is PackedSequence and cast["steps"].data.dtype == torch.float64
    assert torch.equal(cast["steps"].batch_sizes, packed.batch_sizes)
    assert type(cast["own"]) is Kinds and cast["own"]["x"].dtype == torch.float64
