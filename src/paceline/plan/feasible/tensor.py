"""Which degrees of the tensor axis a model can have. Imports no torch."""

from __future__ import annotations

from paceline.spec.layout import Layout
from paceline.spec.profile import ModelProfile


def refusal(layout: Layout, profile: ModelProfile) -> str | None:
    """Return why a layout's tensor degree cannot be had with this model, None where it can (or tp is 1)."""
    limits, tp = profile.tensor_limits, layout.tp
    if tp == 1 or limits is None:
        return None
    for what, count in limits.counts.items():
        if count % tp:
            return f"{what} = {count} cannot be shared evenly by tp = {tp}: a split inside one computes something else"
    empty = next((count for count in limits.splits if (tp - 1) * -(-count // tp) >= count), None)
    if empty is not None:
        return f"a layer's {empty} features over tp = {tp} leave a rank without any"
    positions, ranks = profile.tokens_per_sample, tp * layout.cp
    if limits.splits_sequence and positions % ranks:
        named = f"tp = {tp}" if layout.cp == 1 else f"tp * cp = {ranks}"
        return f"samples of {positions} positions cannot be shared evenly by {named}, as sequence parallel must"
    shards = layout.dp_shard * layout.cp
    uneven = next((width for width in limits.widths if width % shards), None)
    if uneven:
        return (
            f"a width of {uneven} cannot be shared evenly by dp_shard * cp = {shards}: torch's fully_shard takes"
            " uneven parts of the first dimension only, which tp splits already"
        )
    return None
