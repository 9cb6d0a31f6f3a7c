"""Which collectives a step of a plan makes: over which axis, of how many bytes, in how many calls.

Pricing turns collectives into seconds, placement into bytes per link. Volumes are per device: of the stage that
computes longest for what stands inside forward and backward, of the heaviest stage for weights and gradients.

- tp: the stream is gathered before and reduced and scattered after attention and the feed-forward, in each pass
  (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2); the loss sums a few numbers a token;
- cp: keys and values are gathered in the forward pass and again in the backward pass, or sent around a ring, and their
  gradients summed up in fp32 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Liu et al. 2023, arXiv:2310.01889);
  under a mask they are gathered once, and kept;
- ep: routed tokens go to their experts and back by all-to-all (Lepikhin et al. 2020, arXiv:2006.16668, section 3.2);
- pp: every stage sends the stream on, and its gradient back (Narayanan et al. 2021, arXiv:2104.04473, section 3.2);
- fsdp: weights are gathered and gradients reduced and scattered, those of routed experts over `expert_shard`, among the
  devices that have the same ones; dp_replicate: gradients are summed over copies. ZeRO stages say how often
  (run/parallel/data/sharding.py);
- data: frozen weights that are spread over all ranks that read different samples are gathered, a teacher's once, those
  in four bits whenever they are unpacked;
- optimizers that need whole parameters gather them for the update (run/updates/one_rule.py), counted as if every
  rule of the task did: a bound from above.

Recompute repeats the forward pass's.
"""

from __future__ import annotations

from paceline.plan.cost.collectives.collective import Collective
from paceline.plan.cost.collectives.of_weights import (
    copies_collective,
    frozen_collective,
    gather_collectives,
    packed_collective,
    reduce_collectives,
    update_collectives,
)
from paceline.plan.cost.collectives.within_passes import (
    context_collectives,
    expert_collective,
    loss_collective,
    stage_sends,
    stream_collectives,
)
from paceline.plan.cost.sheet import Sheet


def collectives(sheet: Sheet) -> tuple[Collective, ...]:
    """Return all collectives of a step. Those over a group of one device are listed too, and move nothing."""
    of_model = (*stream_collectives(sheet), loss_collective(sheet), *context_collectives(sheet))
    of_ranks = (expert_collective(sheet), stage_sends(sheet), copies_collective(sheet))
    of_state = (*gather_collectives(sheet), *reduce_collectives(sheet), *update_collectives(sheet))
    of_frozen = (frozen_collective(sheet), packed_collective(sheet)) if sheet.columns.common.frozen == "spread" else ()
    return (*of_model, *of_ranks, *of_state, *of_frozen)
