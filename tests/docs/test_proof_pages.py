"""The pages of proven layouts and of curves say what the results that are kept say, and these are all equal."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.spec.proof.plain import from_plain
from paceline.spec.proof.records import FirstDifference, PartProof, Proof, Rounding
from paceline.task.data.facts import data_facts
from paceline.task.profile.of_task import profile_task
from paceline.verify.compare.tolerance import TOLERANCES
from paceline.verify.process.every import every_plan

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts"


def script(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    patch.syspath_prepend(SCRIPTS)
    return importlib.import_module(name)


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("write_layouts", monkeypatch)


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("write_curves", monkeypatch)


def test_the_page_of_records_is_that_of_their_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    written = script("write_proof", monkeypatch)
    assert written.PAGE.read_text(encoding="utf-8") == written.page(), "run: python docs/scripts/write_proof.py"


def test_a_proof_is_the_same_after_it_has_been_plain_data() -> None:
    """As between processes: JSON, whose numbers may be NaN."""
    first = FirstDifference("loss", "loss", 1, 0, 0.5, 2.0, 1.0, 0.5, True, ("loss",), 1, "family", "likely")
    rounding = Rounding("loss", "loss", 2, "fp32", 1e-3, 1e-5, 1e-3, 0.2, None, 1, "fp32", "", True, {"loss": 0.0})
    part = PartProof("even rows", "steps", "tp=2", "fp32", False, 1.5, "", rounding, 3)
    found = {"dtypes": {"fp32": {"loss": math.inf}}, "first_difference": first, "ill_conditioned": rounding}
    proof = Proof("tp=2", False, "unequal", 2.0, 3, "tp=2", (part,), **found)
    told = json.loads(json.dumps(dataclasses.asdict(proof)))
    assert from_plain(Proof, told) == proof
    with pytest.raises(TypeError, match="weather"):
        from_plain(Proof, {**told, "weather": "fine"})
    with pytest.raises(KeyError, match="verdict"):
        from_plain(Proof, {name: value for name, value in told.items() if name != "verdict"})


def test_the_page_of_layouts_is_that_of_the_results(layouts: ModuleType) -> None:
    results = layouts.read_results()
    assert set(results) == set(layouts.FAMILIES)
    assert layouts.PAGE.read_text(encoding="utf-8") == layouts.page(results)


def test_every_result_is_equal_within_the_tolerances(layouts: ModuleType) -> None:
    for name, result in layouts.read_results().items():
        assert result["layouts"], name
        for proof in result["layouts"]:
            assert proof["equal"] and set(proof["differences"]) == {"fp32", "fp64"}, (name, proof)
            for dtype, found in proof["differences"].items():
                assert set(found) >= {"samples", "initial", "loss", "gradients", "grad_norm", "weights", "buffers"}
                assert all(far <= TOLERANCES[quantity][dtype] for quantity, far in found.items()), (name, proof)


@pytest.mark.parametrize("name", ["decoder", "moe"])
def test_every_layout_that_can_be_had_is_in_the_table(
    layouts: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    family = layouts.FAMILIES[name]
    spec = layouts.spec_of(family, tmp_path)
    plans, _ = every_plan(spec, profile_task(spec.task, data_facts(spec.task.data, None)), 8)
    missing = {str(plan.layout) for plan in plans} - {
        proof["layout"] for proof in layouts.read_results()[name]["layouts"]
    }
    assert not missing, f"run: python docs/scripts/write_layouts.py --family {name}"


def test_the_page_and_the_picture_of_curves_are_those_of_the_losses(curves: ModuleType) -> None:
    kept = curves.read_kept()
    assert set(kept["runs"]) == set(curves.RUNS)
    assert curves.PAGE.read_text(encoding="utf-8") == curves.page(kept)
    assert curves.PICTURE.read_text(encoding="utf-8") == curves.picture(kept)


def test_every_curve_lies_on_that_of_one_device(curves: ModuleType) -> None:
    runs = curves.read_kept()["runs"]
    for name, curve in curves.RUNS.items():
        for dtype, most in curves.ON_THE_CURVE.items():
            reference = runs[curves.REFERENCES[curve.model]][dtype]
            assert len(reference) == curves.STEPS and reference[-1] < 0.7 * reference[0], "one device learns"
            assert max(curves.differences(runs[name][dtype], reference)) <= most, (name, dtype)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["shard-tp", "ep-shard"])
def test_trained_again_it_lies_on_the_curve_of_one_device(curves: ModuleType, name: str, tmp_path: Path) -> None:
    curve = curves.RUNS[name]
    one = curves.RUNS[curves.REFERENCES[curve.model]]
    for dtype, most in curves.ON_THE_CURVE.items():
        losses, reference = (curves.train(each, dtype, tmp_path) for each in (curve, one))
        assert max(curves.differences(losses, reference)) <= most, dtype
