"""The copy of a rank's state that saves beside training are made from, where host memory is the device's own: on CPUs.

The first save that is due takes it between two steps, when activations are free, and it stays for those that follow
(checkpoint/beside/stage.py), so that the next step's activations come beside it. Where the host has no room for two of
it, saves are made while training waits, without a copy (run/survive/saving/host_room.py): an upper bound then.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.cost.components import ASSUMED, Component, only, total
from paceline.plan.cost.sheet import Sheet

NAME = "copy for saves"


def staged_components(sheet: Sheet, held: Sequence[Component]) -> list[Component]:
    """Return the bytes of the copy on every plan's fullest device, of what is `held` there; none of accelerators.

    Example: 3 million weights in fp32 with both moments of AdamW are 36 MB, and shards over two devices 18.
    """
    if not sheet.context.stages or sheet.context.cluster.device.kind != "cpu":
        return []
    copied = total(only(held, "weights", "optimizer"))

    def text(i: int) -> str:
        return (
            f"{copied[i]:,.0f} B: weights and optimizer state once more, which saves beside training are written from"
        )

    return [Component(NAME, "buffers", copied, ASSUMED, text, "counted")]
