"""A training that is killed, resumed and re-planned at random reads what the undisturbed one reads, batch by batch.

No process is started: `BatchStream` is all that decides which rank reads what, and a kill is a return to the last saved
position. Every generation has another number of ranks, another micro-batch, even or uneven parts, and opens its source
anew. Three epochs, for windows, packed rows, rows in buckets of equal length, and a mixture.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.run.loop.loader import BatchStream, MicroBatch
from paceline.run.loop.under_plan import UnderPlan
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchCourse, Piece
from paceline.task.data.depth import DepthRule
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.budget import TokenBudget
from paceline.task.data.order.mixture import BLOCK, MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder, ids_at
from paceline.task.data.protocol import Source
from paceline.task.data.read_ahead import ReadAhead
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.tokens import TokenSplit, TokenWriter

SEED, SEQ_LEN, VOCAB, EPOCHS = 11, 8, 2**15, 3
CPU = torch.device("cpu")
QUICKLY = (Phase.reuse, Phase.generate)  # a schedule that fails is short enough to be read


@dataclass(frozen=True)
class Generation:
    """One start of the run: on so many ranks, for so many steps, of which those since the last save are lost."""

    ranks: int
    micro_batch: int
    steps: int
    saved_every: int
    is_killed: bool
    is_even: bool
    ahead: int  # batches that threads read ahead; 0 of none
    together: int  # of them, that a thread reads each time that it is woken

    def plan(self, batch: int) -> Plan:
        """Return its plan: rows in even parts, or the first ranks two more than their part and the last ones fewer."""
        rows: tuple[int, ...] = ()
        if not self.is_even and self.ranks > 1:
            cuts = [min(batch, batch * rank // self.ranks + 2) for rank in range(1, self.ranks)]
            rows = tuple(after - before for before, after in itertools.pairwise([0, *cuts, batch]))
        passes = accumulation_for(batch, self.ranks, self.micro_batch, rows)
        return Plan(Layout(dp_shard=self.ranks), micro_batch=self.micro_batch, accumulation=passes,
                    batch_samples=batch, rows=rows)  # fmt: skip


generations = st.builds(
    Generation, st.integers(1, 12), st.integers(1, 7), st.integers(1, 9), st.integers(1, 4), st.booleans(),
    st.booleans(), st.sampled_from([0, 0, 1, 5]), st.integers(1, 3),
)  # fmt: skip
schedules = st.lists(generations, min_size=1, max_size=8)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> list[TokenSplit]:
    """Return two corpora of documents of unequal lengths, whose tokens tell their place."""
    found = []
    for number, tokens in enumerate((500, 340)):
        folder, at = tmp_path_factory.mktemp(f"corpus{number}"), 0
        with TokenWriter(folder, "train", VOCAB, VOCAB - 1) as writer:
            while writer.tokens < tokens:
                length = at % 13 + 1
                writer.add([np.arange(at, at + length) + 10_000 * number])
                at += length
        found.append(writer.result())
    return found


def opened(kind: str, splits: list[TokenSplit]) -> Any:
    """Return a source of a kind. The one in buckets takes the tokens of a sample for its length."""
    windows = [TokenSource(split, VOCAB, SEQ_LEN) for split in splits]
    if kind == "plain":
        return windows[0]
    if kind == "packed":
        return PackedSource(splits[0], VOCAB, SEQ_LEN, cross_documents=False)
    if kind == "curriculum":
        harder = MixShare(windows[1].samples, 1.0, ((BLOCK, 5.0),), most=BLOCK // 4 + 2500)
        shares = [MixShare(windows[0].samples, 3.0), harder]
        return MixedSource(windows, ["a", "b"], MixtureOrder(shares, [GlobalOrder(each.samples) for each in windows]))
    if kind == "bucketed":
        return InOrder(windows[0], BucketedOrder(np.arange(windows[0].samples) * 7919 % 31, bucket=10, window=30))
    shares = [MixShare(windows[0].samples, 3.0, ((2048, 1.0),)), MixShare(windows[1].samples, 1.0)]
    return MixedSource(windows, ["a", "b"], MixtureOrder(shares, [GlobalOrder(each.samples) for each in windows]))


def train(source: Any, schedule: list[Generation], batch: int, steps: int) -> dict[int, list[list[MicroBatch]]]:
    """Return what each rank read for each step that counts, through all generations, until so many are made."""
    done: dict[int, list[list[MicroBatch]]] = {}
    saved = 0
    for generation in itertools.cycle(schedule):
        again, plan, made = pickle.loads(pickle.dumps(source)), generation.plan(batch), saved
        streams = [BatchStream(again, SEED, plan, rank, CPU).at for rank in range(generation.ranks)]
        ahead = [ReadAhead(at, lambda: None, rule_of(generation)) for at in streams] if generation.ahead else []
        stop = min(steps, made + generation.saved_every + generation.steps)
        for step in range(made, stop):
            read = [each.take for each in ahead] or streams
            done[step] = [list(at(step * batch, step + 1).micro_batches) for at in read]
            for each, coming in itertools.product(ahead, range(1, generation.ahead + 1)):
                each.begin((step + coming) * batch, step + coming + 1)
        for each in ahead:
            each.close()
        made = stop
        saved = made // generation.saved_every * generation.saved_every if generation.is_killed else made
        if made == steps:
            return done
    raise AssertionError("a cycle has no end")


def rule_of(generation: Generation) -> DepthRule:
    """Return what keeps to as many batches ahead as a generation has, whatever reads and steps take."""
    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    rule.seen = lambda item, times: None  # type: ignore[method-assign]
    rule.depth, rule.together = generation.ahead, min(generation.together, generation.ahead)
    return rule


def check(source: Any, schedule: list[Generation], batch: int, total: int) -> np.ndarray:
    """Hold every batch against the undisturbed run's, in order and in content; return all ids in their order."""
    steps = -(-total // batch)
    wanted = ids_at(source, SEED, np.arange(steps * batch)).reshape(steps, batch)
    found = train(source, schedule, batch, steps)
    for step, ranks in found.items():
        assert len({len(passes) for passes in ranks}) == 1, "ranks that pass unequally often wait for ever"
        counted = [part for passes in ranks for part in passes if part.counts]
        assert np.array_equal(np.concatenate([part.ids for part in counted]), wanted[step]), f"step {step + 1}"
        reference = source.read(wanted[step])
        for name in reference:
            assert torch.equal(torch.cat([part.data[name] for part in counted]), reference[name])
    return wanted.reshape(-1)


@pytest.mark.parametrize("kind", ["plain", "packed", "bucketed"])
@settings(max_examples=15, deadline=None, phases=QUICKLY)
@given(schedule=schedules, batch=st.integers(1, 24))
def test_each_epoch_holds_each_sample_once(
    kind: str, schedule: list[Generation], batch: int, splits: list[TokenSplit]
) -> None:
    source: Source = opened(kind, splits)
    ids = check(source, schedule, batch, EPOCHS * source.samples)
    for epoch in range(EPOCHS):
        within = ids[epoch * source.samples : (epoch + 1) * source.samples]
        assert np.array_equal(np.sort(within), np.arange(source.samples))


@settings(max_examples=5, deadline=None, phases=QUICKLY)
@given(schedule=schedules, batch=st.integers(60, 100))
def test_each_source_of_a_mixture_gives_each_sample_once_an_epoch(
    schedule: list[Generation], batch: int, splits: list[TokenSplit]
) -> None:
    source: MixedSource = opened("mixed", splits)
    ids = check(source, schedule, batch, BLOCK)[:BLOCK]  # sources come to their counts where a block ends
    counts = np.bincount(ids, minlength=source.samples)
    ends = np.cumsum([each.samples for each in source.sources])
    for of_source in np.split(counts, ends[:-1]):
        assert of_source.max() - of_source.min() <= 1 and of_source.min() >= EPOCHS


class Growing:
    """Batches that grow at a step and at a position, and pass as many rows at once as a plan says, or one more."""

    course = BatchCourse(61, (Piece(9, None, 80), Piece(23, None, 131)))

    def at(self, step: int, position: int) -> int:
        """Return the samples of update `step`."""
        return self.course.at(step, position)

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many rows a rank passes at once."""
        return micro_batch + samples % 2


@settings(max_examples=4, deadline=None, phases=QUICKLY)
@given(schedule=schedules)
def test_batches_that_grow_while_a_mixture_changes_are_the_undisturbed_ones(
    schedule: list[Generation], splits: list[TokenSplit]
) -> None:
    """Across the block at which weights change, with a limit that ends a source; a kill goes back to a saved step."""
    source: MixedSource = opened("curriculum", splits)
    sizes, wanted, position = Growing(), dict[int, np.ndarray](), 0
    while position < BLOCK + 700:
        samples = sizes.at(len(wanted) + 1, position)
        wanted[position] = ids_at(source, SEED, np.arange(position, position + samples))
        position += samples
    starts, saved, generation = list(wanted), 0, iter(itertools.cycle(schedule))
    while saved < len(starts):
        now, again = next(generation), pickle.loads(pickle.dumps(source))
        stop = min(len(starts), saved + now.saved_every + 3 * now.steps)
        plan = now.plan(16)  # the plan is for another batch than any of them
        streams = [BatchStream(again, SEED, plan, rank, CPU, sizes) for rank in range(now.ranks)]
        for step in range(saved, stop):
            read = [stream.at(starts[step], step + 1) for stream in streams]
            assert len({len(batch.micro_batches) for batch in read}) == 1
            counted = [part for batch in read for part in batch.micro_batches if part.counts]
            assert np.array_equal(np.concatenate([part.ids for part in counted]), wanted[starts[step]])
            own = source.read(wanted[starts[step]])
            assert torch.equal(torch.cat([part.data["tokens"] for part in counted]), own["tokens"])
        kept = saved + (stop - saved) // now.saved_every * now.saved_every if now.is_killed else stop
        saved = stop if stop == len(starts) else kept
    shares = [np.isin(wanted[at], np.arange(source.sources[0].samples)).mean() for at in (starts[0], starts[-1])]
    assert shares[0] > 0.7 and shares[1] < 0.6, "the weights have changed"


@dataclass(frozen=True)
class PerEpoch:
    """Batches whose size is another one in each epoch, and divides it: an epoch's end is a batch's end."""

    course: BatchCourse

    @classmethod
    def drawn(cls, drawn: st.DataObject, epoch: int) -> PerEpoch:
        """Draw a size for each epoch, none smaller than the one before."""
        fits = [size for size in range(1, epoch + 1) if epoch % size == 0 and epoch // size <= 64]
        sizes = sorted(drawn.draw(st.sampled_from(fits)) for _ in range(EPOCHS))
        return cls(BatchCourse(sizes[0], tuple(Piece(None, n * epoch, sizes[n]) for n in range(1, EPOCHS))))

    def at(self, step: int, position: int) -> int:
        """Return the samples of update `step`."""
        return self.course.at(step, position)

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many rows a rank passes at once."""
        return micro_batch


@pytest.mark.parametrize("kind", ["plain", "packed", "bucketed", "mixed"])
@settings(max_examples=3, deadline=None, phases=QUICKLY)
@given(schedule=schedules, drawn=st.data())
def test_a_resume_where_an_epoch_ends_reads_the_undisturbed_batches(
    kind: str, schedule: list[Generation], drawn: st.DataObject, splits: list[TokenSplit]
) -> None:
    """Each epoch is begun twice, by other ranks: killed some steps into it, all that it read ahead is lost with it.

    The global batch grows there too. An epoch of the mixture is a block, after the first of which its weights change.
    """
    source: Any = opened(kind, splits)
    epoch = BLOCK if kind == "mixed" else source.samples
    sizes, generation, ids = PerEpoch.drawn(drawn, epoch), iter(itertools.cycle(schedule)), dict[int, np.ndarray]()
    for begins, is_killed in itertools.product(range(0, EPOCHS * epoch, epoch), (True, False)):
        now, position, again = next(generation), begins, pickle.loads(pickle.dumps(source))
        ends = min(begins + epoch, begins + now.steps * sizes.at(1, begins)) if is_killed else begins + epoch
        streams = [BatchStream(again, SEED, now.plan(16), rank, CPU, sizes) for rank in range(now.ranks)]
        ahead = [ReadAhead(each.on_host, (lambda: None) if now.ahead else None, rule_of(now)) for each in streams]
        while position < ends:
            samples, step = sizes.at(1, position), len([at for at in ids if at < position]) + 1
            read = [each.take(position, step) for each in ahead]
            for each, coming in itertools.product(ahead, range(1, now.ahead + 1)):
                each.begin(position + coming * samples, step + coming)  # beyond an epoch others are asked for
            assert {batch.samples for batch in read} == {samples}
            assert len({len(batch.micro_batches) for batch in read}) == 1
            counted = [part for batch in read for part in batch.micro_batches if part.counts]
            ids[position] = ids_at(source, SEED, np.arange(position, position + samples))
            assert np.array_equal(np.concatenate([part.ids for part in counted]), ids[position])
            own = source.read(ids[position])
            assert all(torch.equal(torch.cat([part.data[name] for part in counted]), own[name]) for name in own)
            position += samples
        for each in ahead:
            each.close()
        assert position == ends
    if kind != "mixed":
        for begins in range(0, EPOCHS * epoch, epoch):
            within = np.concatenate([ids[at] for at in ids if begins <= at < begins + epoch])
            assert np.array_equal(np.sort(within), np.arange(epoch))


@settings(max_examples=6, deadline=None, phases=QUICKLY)
@given(schedule=schedules, budget=st.integers(20, 400))
def test_batches_of_a_number_of_tokens_are_the_undisturbed_ones(
    schedule: list[Generation], budget: int, splits: list[TokenSplit]
) -> None:
    """Rows in buckets, batches that straddle epochs, read ahead as a run does, by other ranks after each resume."""
    source: Any = opened("bucketed", splits)
    source.lengths = np.arange(source.samples) * 7919 % 31
    longest, wanted, position = 30, [], 0
    sizes = TokenBudget(source, SEED, budget, longest)
    while position < EPOCHS * source.samples:
        samples = sizes.at(0, position)
        ids = ids_at(source, SEED, np.arange(position, position + samples))
        tokens = source.lengths[ids].sum(), source.lengths[ids_at(source, SEED, np.array([position + samples]))].sum()
        assert (tokens[0] <= budget or samples == 1) and sum(tokens) > budget, "as many as there is room for"
        wanted.append((position, ids))
        position += samples
    saved = 0
    for now in itertools.cycle(schedule):
        again, plan = pickle.loads(pickle.dumps(source)), now.plan(max(1, budget // longest))
        streams = [
            BatchStream(again, SEED, plan, rank, CPU, TokenBudget(again, SEED, budget, longest))
            for rank in range(now.ranks)
        ]
        ahead = [ReadAhead(each.on_host, (lambda: None) if now.ahead else None, rule_of(now)) for each in streams]
        stop = min(len(wanted), saved + now.saved_every + 2 * now.steps)
        for step in range(saved, stop):
            position, ids = wanted[step]
            read = [each.take(position, step + 1) for each in ahead]
            for stream, batches, batch in zip(streams, ahead, read, strict=True):
                own: Any = SimpleNamespace(_stream=stream, batches=batches)
                UnderPlan.read_ahead(own, batch, len(wanted), lambda coming: coming)
            assert len({len(batch.micro_batches) for batch in read}) == 1
            counted = [part for batch in read for part in batch.micro_batches if part.counts]
            assert np.array_equal(np.concatenate([part.ids for part in counted]), ids)
            assert torch.equal(torch.cat([part.data["tokens"] for part in counted]), source.read(ids)["tokens"])
            assert all(len(part.ids) * source.lengths[part.ids].max() <= now.micro_batch * longest for part in counted)
        for each in ahead:
            each.close()
        if stop == len(wanted):
            return
        saved = saved + (stop - saved) // now.saved_every * now.saved_every if now.is_killed else stop
