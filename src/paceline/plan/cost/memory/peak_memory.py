"""What a step holds at its peak, in bytes on the fullest device, by component.

The classes of sharding follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5) as FSDP2 carries them out:
weights rest as fp32 shards in every class and are gathered in the compute dtype. `tp` divides all that a block holds
but the gathered inputs of its products; `cp` divides all that grows with tokens, what one layer exchanges aside; a
pipeline stage keeps what its micro-batches in flight have saved (Korthikanti et al. 2022, arXiv:2205.05198, section
4). Norms' weights, whole on every tensor rank, are counted as if divided: they are a ten-thousandth of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.plan.cost.collectives import exchanged_keys, goes_around
from paceline.plan.cost.columns import Columns, Flags, Floats, Ints
from paceline.plan.cost.components import ASSUMED, MEASURED, Component, in_modes, total, without
from paceline.plan.cost.memory.flat_gradients import flat_bytes, flat_gradients, keeps_narrow
from paceline.plan.cost.memory.moments import held_in_turn, late_gradients
from paceline.plan.cost.memory.offload import MOVING_BLOCKS, optimizer_held, optimizer_text, rests_on_host
from paceline.plan.cost.memory.recompute import partitions
from paceline.plan.cost.model_parts import Parts, largest_of
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import updated_bytes, updated_parameters
from paceline.plan.cost.time.gathers import gathered_memory
from paceline.spec.adapt.adapter import NF4_BYTES, NF4_VALUE_BYTES
from paceline.spec.cluster import SOURCES
from paceline.spec.optimizers import gathered_values, state_values

# What a CPU's allocator keeps beyond what is in use, as a part of activations and transients: eight runs of small
# decoders on one machine missed 16 to 20 % of large sums and more of small ones.
CPU_ALLOCATOR_SHARE = 0.20


def memory_components(sheet: Sheet, stage: str = "fullest") -> list[Component]:
    """Return bytes per component on every plan's fullest device; they add up to the peak.

    With `stage` "first" or "last", those of a device of that pipeline rank.
    """
    held = HeldAtPeak(sheet)
    columns = held.columns()
    if len(sheet.rows.plan) == len(sheet.columns):
        return columns
    rows = sheet.rows  # of equal stages the first holds the most micro-batches
    shown = rows.largest(total(columns)) if stage == "fullest" else rows.ends(last=stage == "last")
    return [
        replace(
            column,
            values=column.values[shown],
            text=lambda i, column=column: column.text(int(shown[i])),  # type: ignore[misc]
            applies=None if column.applies is None else column.applies[shown],
        )
        for column in columns
    ]


def in_flight(columns: Columns, rank: Ints) -> Floats:
    """Return how many micro-batches' activations a pipeline rank holds at most, in units of all its chunks.

    GPipe holds all; 1F1B as many as there are ranks from here on (Narayanan et al. 2021, arXiv:2104.04473, section
    2.2); interleaved, the warm-up chunks of torch.distributed.pipelining and one more.
    """
    ranks, count, chunks = columns.pp, columns.accumulation, columns.virtual_stages
    per_round = count // np.maximum(1, count // ranks)
    ahead = np.where(columns.scheduled("zero-bubble"), 1, 2)
    warm_up = np.minimum(count * chunks, (chunks - 1) * per_round + ahead * (ranks - 1 - rank))
    interleaved = np.minimum(count * chunks, warm_up + 1) / chunks
    several = np.where(columns.scheduled("1f1b"), np.minimum(count, ranks - rank), interleaved)
    flying: Floats = np.where(columns.scheduled("gpipe"), count, several).astype(np.float64)
    return np.where(ranks > 1, flying, 1.0)


@dataclass(frozen=True)
class HeldAtPeak:
    """What every different pipeline stage of every plan holds: columns of rows, not of plans."""

    sheet: Sheet

    @cached_property
    def plans(self) -> Columns:
        """The plan of every row."""
        rows = self.sheet.rows
        return self.sheet.columns.take(rows.plan) if len(rows.plan) > len(self.sheet.columns) else self.sheet.columns

    @cached_property
    def parts(self) -> Parts:
        """The part of every row."""
        return self.sheet.rows.parts

    @cached_property
    def size(self) -> int:
        """Bytes of a weight that is updated."""
        return updated_bytes(self.sheet)[0]

    @property
    def compute(self) -> int:
        """Bytes of a value in the compute dtype."""
        return self.sheet.rates.element_bytes

    @cached_property
    def parameters(self) -> Floats:
        """Parameters of a device before any sharding."""
        return self.parts.parameters / self.plans.tp

    @cached_property
    def trained(self) -> Floats:
        """The parameters that are trained."""
        return self.parts.trained / self.plans.tp

    @property
    def _narrowed(self) -> Floats:
        """Bytes that frozen weights of two bytes spare a device."""
        spared = (self.size - 2) * self.parts.total("narrow_parameters")
        return spared / self.plans.tp / self.plans.held_degree

    @property
    def _spread(self) -> Floats:
        """Parameters that are spread over all data ranks, whatever the others are."""
        is_spread = self.plans.common.frozen == "spread"
        return self.parts.forward_only if is_spread else np.zeros(len(self.plans))

    def _rest_text(self, i: int) -> str:
        """Return what a formula says of frozen weights that are spread, or of two bytes; nothing without any."""
        spread, narrow = self._spread[i], self.parts.total("narrow_parameters")[i]
        text = f", {spread:,.0f} of them / {self.plans.data_degree[i]} data ranks" if spread else ""
        return text + (f", 2 B of {narrow:,.0f} frozen ones" if narrow else "")

    def _packed(self) -> list[Component]:
        """Return frozen weights in four bits, with the one layer that is unpacked, and gathered, at a time."""
        packed = self.parts.total("packed_parameters")
        if not np.any(packed):
            return []
        largest = largest_of(self.parts.counts, self.parts.shapes["unpacked_elements"])
        unpacked = 8 + self.compute  # two fp32 values on the way, and the one that is computed with

        is_spread = self.plans.common.frozen == "spread"
        ranks = self.plans.data_degree if is_spread else np.ones(len(self.plans), dtype=np.int64)
        layer = unpacked + NF4_VALUE_BYTES * (ranks > 1)
        scales = NF4_BYTES - NF4_VALUE_BYTES

        def text(i: int) -> str:
            each = f"{NF4_BYTES:.4f} B"
            if ranks[i] > 1:
                each = f"({NF4_VALUE_BYTES} B / {ranks[i]} data ranks + {scales:.4f} B)"
            return f"{each} x {packed[i]:,.0f} frozen weights + {layer[i]:g} B x {largest[i]:,.0f} unpacked"

        values = (NF4_VALUE_BYTES / ranks + scales) * packed + layer * largest
        return [Component("weights in four bits", "weights", values, MEASURED, text, "QLoRA (Dettmers et al. 2023)")]

    def _trained_text(self, i: int) -> str:
        """Return the parameters with gradients and state, for a formula."""
        trained = self.parts.trained[i]
        return "parameters" if trained == self.parts.parameters[i] else f"{trained:,.0f} trained parameters"

    @cached_property
    def local_parameters(self) -> Floats:
        """Parameters of a device before any sharding, of the experts only its own."""
        experts = self.parts.total("expert_parameters")
        return self.parameters - experts * (1 - 1 / self.plans.ep) / self.plans.tp

    @property
    def _root(self) -> Floats:
        """Parameters outside of the repeated blocks that are gathered at once."""
        if not self.sheet.context.software.splits_root:
            return self.parts.root_parameters
        shapes = self.parts.shapes
        return largest_of(self.parts.counts, shapes["parameters"] * (1 - shapes.repeated))

    @property
    def _largest_block(self) -> Floats:
        """Parameters of the largest repeated block, of which two are gathered beside them: in use, and on its way."""
        return self.parts.largest_block(self.plans.ep)

    @cached_property
    def flying(self) -> Floats:
        """Micro-batches whose activations are held at once."""
        return in_flight(self.plans, self.sheet.rows.first)

    def here(self, i: int) -> str:
        """Return how a device's share of the parameters is divided, ZeRO aside."""
        return self.sheet.held_text(int(self.sheet.rows.plan[i]))

    def over(self, i: int) -> str:
        """Return how the state is divided, for a formula."""
        shards, with_cp = self.plans.held_degree[i], " x cp" if self.plans.cp[i] > 1 else ""
        return self.here(i) + (f" / dp_shard{with_cp} {shards}" if shards > 1 else "")

    def columns(self) -> list[Component]:
        """Return all components."""
        context = self.sheet.context
        size, values, software = self.size, state_values(context.optimizer), context.software
        state = size * updated_parameters(self.plans, self.parts)
        weights, resting = size * self.parameters / self.plans.held_degree - self._narrowed, f"{size} B"
        weights = weights - size * self._spread * (1 / self.plans.held_degree - 1 / self.plans.data_degree)
        if software.master_weights:
            weights = self.compute * self.local_parameters / np.where(self.plans.zero == 3, self.plans.state_degree, 1)
            resting = f"{self.compute} B"
        masters = software.master_weights and not software.weight_bytes
        of_state, told = self._state(values, masters)
        *short_lived, free, of_head = self._activations()
        copies, gradients = self._weight_copies(), self._gradients()
        passing = [copies, *short_lived, self._buffers(), self._loss_buffers()]
        in_turn = held_in_turn(self.sheet, self.plans, self.parts, gradients.values, total(passing), of_head)
        # Gradients that come later take what is free by then.
        late = np.where(late_gradients(self.sheet, self.plans), gradients.values + in_turn.values, 0.0)
        free = np.maximum(0.0, free - late)
        held = [
            Component(
                "weights",
                "weights",
                weights,
                MEASURED,
                lambda i: f"{resting} x {self.parts.parameters[i]:,.0f} parameters{self.over(i)}{self._rest_text(i)}",
                "ZeRO (Rajbhandari et al. 2020)",
            ),
            *self._packed(),
            gradients,
            Component(
                "optimizer state",
                "optimizer",
                optimizer_held(self.sheet, of_state * state),
                MEASURED,
                lambda i: optimizer_text(
                    self.sheet,
                    f"{told} x {self._trained_text(i)}{self.over(i)} ({context.optimizer})",
                ),
                "ZeRO (Rajbhandari et al. 2020)",
            ),
            *self._sync(state),
            *passing,
            in_turn,
        ]
        if gathered_values(context.optimizer):
            idle = np.maximum(0.0, total([*short_lived, copies, in_turn]))
            held.append(gathered_memory(self.plans, self.parts, context.optimizer, idle))
        flat = flat_bytes(self.sheet, self.plans, self.local_parameters)
        if flat.any():
            others = gradients.values - self.compute * self.local_parameters / self.plans.held_degree
            held.append(flat_gradients(flat, total(short_lived) + others))
            flat = flat - held[-1].values
        return [*held, *self._beside_tensors(held, short_lived, flat + free)]

    def _state(self, values: float, masters: bool) -> tuple[float, str]:
        """Return an optimizer's values for a weight, and fp32 masters, as weights' sizes; and the bytes in words."""
        size, of_moment = updated_bytes(self.sheet)
        if size == of_moment:
            return values + masters, f"{values + masters} values x {size} B"
        both = values * of_moment / size + masters
        return both, f"({values} values x {of_moment} B{f' + {size} B' if masters else ''})"

    def _beside_tensors(
        self, held: Sequence[Component], short_lived: Sequence[Component], apart: Floats
    ) -> list[Component]:
        """Return what no tensor fills: the allocator's free blocks, and what the process holds before any tensor.

        A caching allocator holds on to blocks that no tensor fills: the more buffers of different sizes come and go,
        the more. A CPU's does so for all that comes and goes. `apart` are bytes that got blocks of their own, though as
        many were free: those were smaller ones.
        """
        context = self.sheet.context
        on_cpu, runtime = context.cluster.device.kind == "cpu", context.cluster.device.runtime_bytes
        doublings = np.log2(self.plans.tp) + np.log2(self.plans.pp)
        kept = context.constants.allocator_share * doublings
        kept = np.full(len(self.plans), CPU_ALLOCATOR_SHARE) if on_cpu else kept
        of_what = "activations and transients" if on_cpu else "all but the optimizer's state, by tp and pp"
        loose = kept * total(short_lived if on_cpu else without(held, "optimizer")) + apart
        # Before it asks for more than there is, it gives back what it keeps (memory/usable.py).
        room = np.maximum(0.0, context.cluster.device.memory_bytes.value - runtime.value - total(held))
        unused = loose if on_cpu else np.fmin(loose, np.where(room > 0, room, np.inf))

        def kept_text(i: int) -> str:
            words = f"{kept[i]:.0%} of {of_what}"
            words += f", and {apart[i]:,.0f} B that are free while others are asked for" if apart[i] else ""
            return words + (", as far as the device has room" if unused[i] == room[i] else "")

        return [
            Component("allocator buffers", "cache", unused, ASSUMED, kept_text, "caching allocator"),
            Component(
                "runtime",
                "runtime",
                np.full(len(self.plans), runtime.value),
                SOURCES.index(runtime.source),
                lambda i: runtime.note or "process before any tensor",
                "process before any tensor",
            ),
        ]

    def _sync(self, state: Floats) -> list[Component]:
        """Return what keeping copies in step holds beside the weights, each as large as these: nothing by default."""
        sync = self.plans.common.sync
        held = 1 + bool(sync.momentum) if sync.has_outer_step else int(sync.wire != "full")
        of_what = "left out of gradients" if sync.wire != "full" else "weights that copies share"
        of_what += ", and the outer momentum" if sync.momentum else ""
        some = self.plans.dp_replicate > 1

        def text(i: int) -> str:
            return f"{held} x {self.size} B x parameters{self.over(i)}: {of_what}"

        kept = Component(
            "copies in step", "optimizer", np.where(some, held * state, 0.0), MEASURED, text, "counted", some
        )
        return [kept] if held else []

    def _gradients(self) -> Component:
        plans, shards = self.plans, self.plans.held_degree
        software = self.sheet.context.software
        size = max(software.gradient_bytes, self.size if self.compute > 4 else 0)
        # ZeRO-1, and ZeRO-3 where a plan says so, add up whole gradients over micro-batches; with a single one they are
        # scattered as they come, where there is no buffer beside 16-bit weights that holds all of them whatever comes.
        once = plans.reduces_once | ((plans.zero == 2) & software.reduces_once) | software.sums_whole
        whole = (shards == 1) | (once & ((plans.accumulation > 1) | software.master_weights))
        both = whole & (shards > 1) & (not software.master_weights)
        held = size * np.where(both, 1 + 1 / shards, np.where(whole, 1.0, 1 / shards))
        beside = whole & software.sums_after_backward & (self.compute < size)
        held = held + np.where(beside, self.compute, 0)

        def text(i: int) -> str:
            words = f"{size} B x {self._trained_text(i)}{self.here(i)}"
            words += "" if whole[i] else f" / dp_shard {shards[i]}"
            words += f", and {self.compute} B of each before it is added" if beside[i] else ""
            return words + (", whole until the last micro-batch, and this device's shard" if both[i] else "")

        parameters = self.local_parameters if software.master_weights else self.trained
        values, law = parameters * held, "ZeRO (Rajbhandari et al. 2020)"
        return Component("gradients", "gradients", values, MEASURED, text, law)

    def _weight_copies(self) -> Component:
        """Return weights in the compute dtype beside the fp32 ones: gathered, or cast and saved for backward."""
        size, plans, parts, flying = self.compute, self.plans, self.parts, self.flying
        root, largest = self._root / plans.tp, self._largest_block / plans.tp
        if self.sheet.context.software.gathers_weights:  # one in use and the next on its way
            root, largest = np.zeros(len(plans)), parts.largest_weight(plans.ep) / plans.tp
        narrow = parts.total("narrow_parameters") / plans.tp  # they rest as they are computed with, and are not cast
        no_recompute = plans.recomputes("none")
        # Blocks that a budget spares recompute keep theirs for every micro-batch in flight.
        spared = np.zeros(len(plans))
        if self.sheet.mixed is not None:
            spared = self.sheet.over_modes(in_modes(parts.shapes["parameters"], "none")) / plans.tp
        own = self.parameters - narrow - self._spread
        one_unit = np.minimum(flying * own, np.minimum(own, root + largest) + flying * spared)
        narrower = size < (self.sheet.context.software.weight_bytes or 4)
        cast = np.where(no_recompute, flying * own, one_unit) if narrower else np.zeros(len(plans))
        gathered = self.local_parameters
        third = plans.zero == 3
        alone = np.where(self._spread > 0, parts.forward_only_gathered, 0.0)
        at_once = root + 2 * largest
        live = self.sheet.context.software.live_parameters
        if live:
            at_once = np.maximum(live, parts.largest_weight(plans.ep) / plans.tp)
        sharded = np.where(third, np.minimum(gathered, at_once), gathered - self._spread + alone)
        if self.sheet.context.software.master_weights:  # they rest in the compute dtype
            cast, sharded = np.zeros(len(plans)), np.where(third & (plans.state_degree > 1), sharded, 0.0)

        def text(i: int) -> str:
            if plans.is_sharded[i]:
                units = f"{at_once[i]:,.0f} live parameters" if live else "(root + 2 largest blocks)"
                what = units if third[i] else "parameters"
                return f"{size} B x {what}{self.here(i)}, gathered{'' if third[i] else ' for the step'}"
            if alone[i]:
                return f"{size} B x {alone[i]:,.0f} frozen parameters gathered at once, and the others cast"
            if not values[i]:
                return "none: computes on the weights themselves"
            if no_recompute[i]:
                times = f"{flying[i]:g} micro-batches in flight x " if flying[i] > 1 else ""
                return f"{times}{size} B x parameters{self.here(i)}, cast"
            blocks = " + blocks without recompute" if spared[i] else ""
            return f"{size} B x (root + largest block{blocks}){self.here(i)}, cast again"

        values = size * np.where(plans.is_sharded, sharded, cast + alone)
        return Component("weight copies", "buffers", values, MEASURED, text, "FSDP2's gathered and cast weights")

    def _activations(self) -> tuple[Component, Component, Floats, Floats]:
        """Return what stands from forward to backward, what is short-lived, and the bytes that are free by then.

        And, of the first two, the bytes that the head needs more than a block does.

        The head's own is used before any block is computed again, so where one is, the larger of the two moments
        counts. Blocks have been passed before the head, though, and what they needed is free in other sizes than the
        head asks for. Example: 3 GB of logits and as much for their gradients, or a block of 4 GB and 0.5 of its
        gradients: 6 GB, and 3.5 or 4 that the allocator keeps: 4, where 3 + 4 + 3 are what it has asked for in all.
        """
        sheet, shapes, rows, size = self.sheet, self.sheet.context.shapes, self.sheet.rows, self.compute
        own = sheet.kept_bytes
        saved, part, _ = own
        on_host = rests_on_host(sheet)
        outside = saved * (1 - shapes.repeated)
        once = np.einsum("rs,rs->r", self.parts.counts, (outside * shapes.is_head)[rows.plan])
        kept = np.einsum("rs,rs->r", self.parts.counts, (outside * ~shapes.is_head)[rows.plan])
        # What the head keeps of a micro-batch is used at once, unless all go forward first.
        others = once * np.where(self.plans.scheduled("gpipe"), self.flying - 1, 0.0)
        resting = sheet.over_modes(own)
        kept, offloaded = (kept, resting) if on_host else (kept + resting, np.zeros_like(kept))
        # What is computed again stands there for one block at a time, and so does what is on its way from the host.
        fused = partitions(self.plans, sheet.context.software)
        again = np.stack([np.zeros_like(saved), saved - part if not fused else np.zeros_like(saved), saved])
        again = again + MOVING_BLOCKS * own if on_host else again
        working = sheet.most_over_modes(again)
        # The last blocks' are on their way while the head computes.
        moving = sheet.most_over_modes(MOVING_BLOCKS * own) if on_host else np.zeros_like(working)
        in_head, in_block = self._short_lived(shapes.is_head), self._short_lived(~shapes.is_head)
        if fused:  # gradients of values between products are no wider than these
            in_block = np.where(self.plans.recomputes("selective"), in_block * size / max(4, size), in_block)
        micro = self.plans.micro_batch
        is_block = micro * (others + working) + in_block > micro * (once + others + moving) + in_head
        apart = working > moving
        beside = others + np.where(apart & is_block, working, once + moving)
        short = np.where(apart, np.where(is_block, in_block, in_head), np.maximum(in_head, in_block))
        free = micro * (others + once + working - beside) + np.maximum(in_head, in_block) - short
        of_head = micro * (beside - others - working) + short - in_block

        def text(i: int) -> str:
            plan = self.plans.plan(i)
            words = f"{plan.micro_batch} samples x saved values ({size} B, fp32 where kept so)"
            if plan.layout.tp * plan.layout.cp > 1:
                words += f" over cp {plan.layout.cp} x tp {plan.layout.tp}"
                words += ", gathered ones whole" if plan.layout.tp > 1 or sheet.context.profile.masked else ""
            if self.flying[i] != 1:
                words += f", {self.flying[i]:.3g} micro-batches in flight"
            if plan.recompute != "none":
                most = "one block's all" if is_block[i] else "the head's"
                words += f", {plan.recompute} recompute: kept ones and {most}"
            if offloaded[i]:
                in_all = plan.micro_batch * self.flying[i] * offloaded[i]
                words += f"; {in_all:.3g} B in host memory, two blocks' on their way"
            return words

        values = micro * (self.flying * kept + beside)
        law = "Korthikanti et al. 2022, section 4"
        words = "largest short-lived buffers of a block (loss, products)"
        return (
            Component("activations", "activations", values, MEASURED, text, law),
            Component("transients", "activations", short, MEASURED, lambda i: words, "counted"),
            free,
            of_head,
        )

    def _short_lived(self, of: Flags) -> Floats:
        """Return the bytes of the largest short-lived buffers among some of the different blocks."""
        plans, shapes, rows = self.sheet.columns, self.sheet.context.shapes, self.sheet.rows
        grown = (plans.micro_batch / plans.cp)[:, None] * shapes["transient_elements"]
        caps = shapes["transient_cap_elements"]
        elements = np.where(caps > 0, np.minimum(grown, caps), grown) / plans.tp[:, None]
        share = self.sheet.context.software.logit_share or 1.0
        elements = elements * np.where(shapes.is_head, share, 1.0) * of
        found: Floats = max(4, self.compute) * largest_of(self.parts.counts, elements[rows.plan])
        return found

    def _loss_buffers(self) -> Component:
        wide, tp = max(4, self.compute), self.plans.tp
        fixed = self.parts.total("fixed_elements")

        def text(i: int) -> str:
            over = f" / tp {tp[i]}" if tp[i] > 1 else ""
            return f"{wide} B x gradients of the loss, from forward to backward{over}"

        return Component("loss buffers", "buffers", wide * fixed / tp, MEASURED, text, "counted", fixed > 0)

    def _exchanged_keys(self) -> Floats:
        """Return the bytes of what ranks of cp exchange in one layer: keys and values, and their gradients in fp32.

        Gathered ones stand whole beside those in use, which are those of all other ranks at most; what goes around is
        there twice, sent and received. Example: of 1 GB of keys in bf16 over 4 ranks, 1 + 0.75 and 2 GB of gradients;
        around a ring 2 x (0.25 + 0.5).
        """
        sheet, plans, software = self.sheet, self.plans, self.sheet.context.software
        elements = largest_of(self.parts.counts, exchanged_keys(sheet))
        keys, wide = plans.micro_batch * elements / plans.tp, max(4, self.compute)
        part = 2 * keys / plans.cp
        gathered = self.compute * keys
        if software.hides_context or goes_around(sheet):
            found = (self.compute + wide) * part
        elif software.rings_repeated:
            found = gathered + wide * part
        else:
            found = gathered * (2 - 1 / plans.cp) + wide * keys
        return np.where(plans.cp > 1, found, 0.0)

    def _buffers(self) -> Component:
        """Return buffers that collectives read and write besides what they produce."""
        size, compute, plans, parts = self.size, self.compute, self.plans, self.parts
        copies = ~plans.is_sharded & (plans.dp_replicate > 1)
        largest = np.maximum(self._root, self._largest_block) / plans.tp
        trained = np.minimum(largest, self.trained)  # what is frozen has no gradient
        units = 2 * size * trained + compute * largest
        if self.sheet.context.software.gathers_weights:  # a gradient that is reduced beside the next one's product
            units = 2 * compute * parts.largest_weight(plans.ep) / plans.tp
        bucket = np.minimum(plans.common.bucket_bytes, size * self.trained)
        held = np.where(plans.is_sharded, units, np.where(copies, bucket, 0.0))
        stream = plans.micro_batch * compute * self.sheet.context.stream_elements / plans.cp
        held = held + np.where(plans.tp > 1, 2 * stream, 0.0)
        routed = largest_of(parts.counts, parts.shapes["routed_elements"])
        spread = (plans.ep > 1) & (routed > 0)
        keys = self._exchanged_keys()
        held = held + keys
        held = held + np.where(spread, 2 * plans.micro_batch * compute * routed / plans.cp, 0.0)
        # torch.distributed.pipelining sets one aside for each micro-batch and stage, in both directions
        received = plans.accumulation * plans.virtual_stages
        if self.sheet.context.software.master_weights:  # gradients and weights lie where they are reduced and gathered
            held, received = held - np.where(plans.is_sharded, units, 0.0), np.ones_like(received)
        if keeps_narrow(self.sheet):
            held = held + compute * self.sheet.context.software.reduce_bucket
        held = held + np.where(plans.pp > 1, 2 * received * stream / plans.tp, 0.0)
        some = plans.is_sharded | copies | (plans.tp > 1) | spread | (plans.pp > 1) | keeps_narrow(self.sheet)
        some = some | (keys > 0)

        def text(i: int) -> str:
            unit = f"({size} + {size} + {compute}) B x largest unit{self.here(i)}: gradients in and out"
            if trained[i] < largest[i]:
                unit = f"2 x {size} B x {trained[i]:,.0f} trained parameters, and {compute} B x largest unit"
            parts_of_it: list[tuple[Flags, str]] = [
                (plans.is_sharded, unit),
                (copies, "one bucket"),
                (plans.tp > 1, "the stream gathered and before it is scattered"),
                (keys > 0, f"{keys[i]:,.0f} B of a layer's keys and values from other ranks, and of their gradients"),
                (spread, "a block's routed tokens, sent and received"),
                (plans.pp > 1, f"2 x {received[i]} received streams"),
                (np.full(len(plans), keeps_narrow(self.sheet)), "the buffer that gradients are reduced in"),
            ]
            return "; ".join(words for there, words in parts_of_it if there[i]) or "none: one device"

        known = np.where(some, ASSUMED, MEASURED)
        return Component("communication buffers", "buffers", held, known, text, "counted")
