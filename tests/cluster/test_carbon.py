"""Regions: published averages with their year, and never a guess."""

import math

import pytest

from paceline.cluster.catalog.carbon import carbon_of, read_regions
from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError
from paceline.spec.cluster import ClusterSpec


def test_regions_are_plausible_and_carry_their_year():
    regions = read_regions()
    assert len(regions) > 40
    for code, region in regions.items():
        assert len(code) == 2 and code.isupper() and 20 < region.g_per_kwh < 1000 and region.year in (2023, 2024)
    # Ember's yearly electricity data for 2024
    assert regions["US"].g_per_kwh == 383.55 and regions["FR"].g_per_kwh == 44.18 and regions["PL"].g_per_kwh == 614.98


def test_a_region_is_published_and_none_is_unknown():
    sweden = carbon_of("se")
    assert sweden.value == 35.82 and sweden.source == "published" and "2024" in sweden.note
    nowhere = carbon_of("")
    assert math.isnan(nowhere.value) and nowhere.source == "unknown"


@pytest.mark.parametrize(("code", "hint"), [("us-east-1", "carbon_g_per_kwh"), ("Germany", "'DE'"), ("XX", "carbon_g")])
def test_a_region_without_a_figure_is_an_error(code, hint):
    with pytest.raises(ConfigError, match="no carbon intensity") as error:
        carbon_of(code)
    assert hint in error.value.try_


def test_a_stated_intensity_stands_before_the_region():
    cluster, _ = resolve_cluster(ClusterSpec("h100-sxm", region="DE"))
    assert cluster.carbon_g_per_kwh.value == 344.14
    cluster, _ = resolve_cluster(ClusterSpec("h100-sxm", region="DE", carbon_g_per_kwh=12.0, pue=1.2))
    assert cluster.carbon_g_per_kwh.value == 12.0 and cluster.pue.value == 1.2
