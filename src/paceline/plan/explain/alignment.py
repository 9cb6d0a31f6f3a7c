"""What a step on a GPU would save if the head's width were a multiple that its matrix units take."""

from __future__ import annotations

from paceline.plan.planned import Planned
from paceline.task.profile.aligned import is_aligned

PADDED_TO = 64  # of two bytes: rows begin at multiples of 128, which an A100 asks for (section 4.1 of the same guide)
LEAST = 0.01  # of a step's time, below which nothing is said


def alignment_lines(planned: Planned) -> list[str]:
    """Return that padding the vocabulary would shorten the step, and by how much; nothing where it would not.

    Example: of a head over 50,257 words both products of the backward pass are off the matrix units; over 50,304 none.
    """
    head = next((block for block in planned.profile.blocks if block.kind == "head"), None)
    if head is None or not head.input_elements:
        return []
    vocab = round(head.matmul_flops / (2 * head.input_elements))
    sheet = planned.search.candidates.context.sheet(planned.plan)
    seconds = float((sheet.columns.device_samples / sheet.columns.cp * sheet.unaligned_head_seconds)[0])
    share = seconds / planned.forecast.step_seconds.value
    if is_aligned(vocab) or not share >= LEAST:
        return []
    padded = -(-vocab // PADDED_TO) * PADDED_TO
    return [f"faster: a vocabulary of {padded:,}: rows of {vocab:,} are not aligned, which is {share:.0%} of the step"]
