"""Which degrees of the expert axis a model can have. Imports no torch."""

from __future__ import annotations

from paceline.plan.feasible.torch_version import EXPERTS, older_refusal
from paceline.spec.layout import Layout
from paceline.spec.profile import ModelProfile

OVER_DIFFERENT_RANKS = "whose FSDP2 shards the weights of one unit over different ranks"


def refusal(layout: Layout, profile: ModelProfile) -> str | None:
    """Return why a layout cannot spread the model's experts, or None where it can or does not."""
    if layout.ep == 1:
        return None
    count = profile.experts
    if not count:
        return "the model has no experts to spread"
    if count % layout.ep:
        return f"{count} experts cannot be spread evenly over {layout.ep} devices: each holds whole ones"
    remaining = layout.dp_shard * layout.cp // layout.ep
    widths = profile.expert_widths[: 1 if layout.tp > 1 else None]
    if widths and all(width % remaining for width in widths):
        return (
            f"experts of width {' and '.join(map(str, widths))} cannot be sharded over dp_shard x cp / ep = {remaining}"
            " devices: FSDP2 shards a dimension other than the first evenly or not at all"
        )
    return older_refusal(EXPERTS, "ep", OVER_DIFFERENT_RANKS)
