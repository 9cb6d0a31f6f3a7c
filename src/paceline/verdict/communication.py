"""Whether steps wait for what ranks send each other."""

from __future__ import annotations

from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "communication"


def held_up_seconds(seen: StepsSeen) -> float:
    """Return how much of every rank's wait may be for threads that had work and no core: that is the host's part.

    A rank waits for a peer whose thread that trains is not given a core, and for threads that send and receive. What
    other threads wait for (those that share a rank's computing, those that write) delays no collective by itself, and
    grows with whatever else the machine does. Older journals tell of all threads together. What every rank waits in
    every step is not taken off: other programs do not hold up all steps alike.
    """
    sending = seen.most("queued_here") + seen.most("queued_sending")
    held_up = sending if seen.knows("queued_sending") else seen.most("queued")
    return min(max(0.0, seen.least("waiting") - seen.least("waiting_least")), held_up)


def communication_part(seen: StepsSeen, bubble: float = 0.0) -> BoundPart | None:
    """Return the part of a step in which every rank waits for the others' bytes; None of a single rank.

    On a CPU the rank that waits least counts. A rank that waits for a slower one has that one's computing to wait for,
    and the slow one itself does not wait; what all of them wait for is the network. Threads that had work and no core
    are taken off, since a rank also waits for a peer that the machine holds up, and so is the pipeline's `bubble`
    (seconds). On CUDA it is the gradient reduction that nothing hides, of the rank that spends least in it.
    """
    if seen.ranks < 2:
        return None
    if seen.knows("waiting"):
        always, held_up = seen.least("waiting_least"), held_up_seconds(seen)
        waits = max(seen.least("waiting"), always)
        waited = max(0.0, waits - held_up - bubble)
        of = f"of a step of {format_seconds(seen.step_seconds)}"
        evidence = [f"every rank waits at least {format_seconds(waits)} {of} in collectives"]
        if held_up > 0:
            evidence.append(f"{format_seconds(held_up)} of them are taken off: threads had no core")
        if bubble > 0:
            evidence.append(f"{format_seconds(bubble)} of them are the pipeline's, which fills and drains")
        if not seen.whole:
            evidence.append(f"this is rank 0's wait alone, of {seen.ranks} ranks; it may have waited for a slower one")
    else:
        waited = seen.least("reduce")
        evidence = [f"the reduction of gradients takes {format_seconds(waited)} that nothing hides"]
    advice = (
        "a layout that sends less, or over faster links (`paceline plan SPEC --explain` prices them); a larger"
        " task.global_batch, or plan.sync with an outer step, to exchange gradients less often"
    )
    return BoundPart(KIND, share_of(waited, seen.whole_seconds), tuple(evidence), advice)
