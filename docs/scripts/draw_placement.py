"""Draws docs/images/placement.svg: Llama 70B on 512 devices, with racks of four nodes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.placement.draw import placement_svg
from paceline.plan.placement.place import place
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
from paceline.task.profile.decoder import profile_decoder

PICTURE = Path(__file__).parents[1] / "images" / "placement.svg"


def placement_picture() -> str:
    """Return the picture as SVG."""
    size = NAMED_SIZES["llama-70b"]
    model = profile_decoder(dataclasses.replace(size, vocab=nominal_vocab(size)), 8192)
    cluster, _ = resolve_cluster(ClusterSpec("h100-sxm", 512, nodes_per_rack=4))
    layout = Layout(dp_replicate=2, dp_shard=8, tp=8, pp=4)
    plan = Plan(layout, zero=1, micro_batch=1, accumulation=32, batch_samples=512, precision="bf16")
    return placement_svg(place(model, cluster, plan, 15.0)) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(placement_picture(), encoding="utf-8")
