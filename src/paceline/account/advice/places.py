"""Advice on places: a region whose grid emits less."""

from __future__ import annotations

from paceline.account.advice.advice import AdviceEvidence, CostAdvice
from paceline.cluster.catalog.carbon import read_regions

NEAR = 1.1  # times the least intensity, within which a region is as good


def greener_region(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return the region of the catalog with the least carbon for the same energy."""
    own = evidence.figure("cluster", "carbon_g_per_kwh", "value")
    if not own or own != own or not evidence.spent["kwh"]:
        return None
    least = min(read_regions().values(), key=lambda region: region.g_per_kwh)
    if own <= NEAR * least.g_per_kwh:
        return None
    text = f"the grid here emits {own:.0f} g/kWh, that of {least.name} {least.g_per_kwh:.0f}"
    because = f"averages of {least.year}: {least.source}; what moving data costs is not in it"
    saves = 1 - least.g_per_kwh / own
    return CostAdvice("region", text, f"machines in {least.code}", "carbon", saves, "rough", because)
