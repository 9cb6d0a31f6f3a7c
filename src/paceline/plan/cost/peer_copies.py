"""The price of copies of the state in other nodes' memory: host memory, what is sent, and what training waits for.

Copies are made beside training (run/survive/saving/peers.py). What they send hides behind the steps between two copies,
so the time of a step has only the copy to host memory, which training waits for.
"""

from __future__ import annotations

from paceline.plan.cost.rates import weakest
from paceline.spec.amounts import in_steps
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Forecast, Term
from paceline.spec.load import Spec
from paceline.units import format_bytes, format_seconds, plural

# In units of a rank's part: its own and a peer's in the RAM disk, of two moments while the newer one is written; the
# copy in host memory that it is made of; one that is sent and one that is received.
KEPT, WHILE_MADE = 2, 7


def peer_copy_terms(
    spec: Spec, cluster: Cluster, forecast: Forecast, batch_samples: int, items: int
) -> tuple[Term, ...]:
    """Return the terms of copies in other nodes' memory, per device and step; none where a run makes no such copies.

    `items` are those of a sample. Bytes are of the fullest device; seconds beside training are not part of a step's.
    """
    every = spec.run.checkpoints.memory_every
    is_one_machine = cluster.devices <= spec.cluster.devices_per_node  # several nodes of one: as torchrun starts them
    if spec.run.nodes.count < 2 or every is None or is_one_machine:
        return ()
    steps = in_steps(every, spec.task.selection.candidates_of(batch_samples), items, 0)
    size = sum(term.value for term in forecast.memory if term.kind in ("weights", "optimizer"))
    link = cluster.links[-1]
    rate, copied = link.bytes_per_second, spec.cluster.reliability.host_bytes_per_second_per_device
    sent = link.latency_seconds.value + size / rate.value
    source = weakest(rate.source, link.latency_seconds.source)
    part = f"weights and optimizer state of a rank, {format_bytes(size)}"
    return (
        Term("copies kept", KEPT * size, f"{KEPT} x {part}: its own and a peer's, in host memory", "assumed"),
        Term("while they are made", WHILE_MADE * size, f"{WHILE_MADE} x {part}", "assumed"),
        Term(
            "sent to a peer", sent / steps,
            f"({format_seconds(link.latency_seconds.value)} + {format_bytes(size)} at {format_bytes(rate.value)}/s)"
            f" every {plural(steps, 'step')}, beside training", source, kind="sends",
        ),
        Term(
            "waited for", size / copied / steps,
            f"{format_bytes(size)} to host memory at {format_bytes(copied)}/s, every {plural(steps, 'step')}",
            "assumed",
            kind="host", clock="other",
        ),
    )  # fmt: skip
