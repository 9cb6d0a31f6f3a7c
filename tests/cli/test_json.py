"""What `--json` writes: one object of a declared shape, with its version and the exit code, and a small one."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import environment, run_patiently

from paceline.account.bill import Bill
from paceline.cli import output
from paceline.cli.json import shapes
from paceline.cli.json.shapes import ALWAYS, ERROR, FORGET, FORMAT, SHAPES, undeclared
from paceline.cli.main import main
from paceline.plan.explain.compare_clusters import Comparison
from paceline.plan.placement.grouped import Grouped
from paceline.session.verbs.bench import LoaderBench
from paceline.session.verbs.checkpoints import CheckpointPair, Converted, Shown
from paceline.session.verbs.proofs import Verification
from paceline.session.verbs.scoring import ScoredDocuments
from paceline.task.data.prepare.copies import MarkedCopies
from paceline.task.data.prepare.inspect import Inspected

ROOT = Path(__file__).parents[2]
LARGE = ["--set", "task.model=llama-70b", "--set", "cluster.device=h100-sxm", "--set", "cluster.devices=512",
         "--set", "task.data.seq_len=4096", "--set", 'task.global_batch="4 Mi tokens"',
         "--set", 'task.data.max_bytes="100 kB"']  # fmt: skip


def written(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], int]:
    """Return the exit code of a command, what it wrote, and how many bytes that was."""
    code = main([*words, "--json"])
    text = capsys.readouterr().out
    return code, json.loads(text), len(text)


def test_every_object_has_its_version_and_exit_code_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan", "--models"], ["plan", "--provenance"], ["doctor"], ["plan", "--set", "plan.zero=9"],
                  ["report", "nowhere"], ["nonsense"]):  # fmt: skip
        code, found, _ = written(capsys, *words)
        assert next(iter(found)) == "format" and found["format"] == FORMAT == 1, words
        assert found["exit_code"] == code, words
        if "error" in found:
            assert not undeclared(ERROR, set(found)), words


OFF = {"machine": "", "runs": 0, "more": 1}


def test_a_key_that_is_not_declared_is_a_defect_in_tests() -> None:
    assert undeclared(FORGET, {"machine", "runs"}) == {"tasks"}
    with pytest.raises(AssertionError, match="more"):
        output.print_json(OFF, FORGET)


def test_a_user_gets_what_was_found_though_a_key_is_not_declared(capsys: pytest.CaptureFixture[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(output, "CHECKS", [])
    output.print_json(OFF, FORGET, 4)
    assert json.loads(capsys.readouterr().out) == {"format": FORMAT, "exit_code": 4, **OFF}


def test_nothing_is_checked_where_no_test_asks_for_it() -> None:
    """In an interpreter that knows nothing of the tests a shape that is off ends no verb."""
    code = f"from paceline.cli.output import print_json; print_json({OFF!r}, {FORGET!r})"
    ran = run_patiently([sys.executable, "-c", code], 60)
    assert ran.returncode == 0 and json.loads(ran.stdout)["more"] == 1, ran.stderr


def test_forked_commands_are_checked_as_this_process_is(tmp_path: Path) -> None:
    script = tmp_path / "off.py"
    script.write_text(f"from paceline.cli.output import print_json\nprint_json({OFF!r}, {FORGET!r})\n")
    ran = run_patiently([sys.executable, script], 60, env=environment())
    assert ran.returncode == 1 and "are not as cli/json/shapes.py declares them" in ran.stderr


def test_what_is_written_as_it_is_has_the_keys_of_its_shape() -> None:
    """Every key is there always, whatever the command finds: those of commands that are too slow to be run here."""
    written_whole = {
        shapes.SHOW: Shown, shapes.COMPARE: CheckpointPair, shapes.CONVERT: Converted, shapes.VERIFY: Verification,
        shapes.SCORE: ScoredDocuments, shapes.COPIES: MarkedCopies, shapes.INSPECT: Inspected,
        shapes.BENCH: LoaderBench, shapes.BILL: Bill,
    }  # fmt: skip
    for shape, kind in written_whole.items():
        assert not undeclared(shape, {field.name for field in dataclasses.fields(kind)}), shape
    compared = {field.name for field in dataclasses.fields(Comparison)} | {"spec"}
    grouped = {field.name for field in dataclasses.fields(Grouped)} - {"profile"} | {"spec"}
    assert not undeclared(shapes.COMPARED, compared) and not undeclared(shapes.GROUPED, grouped)


def test_every_shape_is_written_by_a_verb_and_told_on_the_page() -> None:
    names = {name: value for name, value in vars(shapes).items() if name.isupper() and value in list(SHAPES)}
    verbs = [path for path in (ROOT / "src/paceline/cli").rglob("*.py") if path.parent.name != "json"]
    code = "\n".join(path.read_text() for path in verbs)
    unused = {name for name in names if name != "ERROR" and not re.search(rf"\b{name}\b", code)}
    assert not unused and len(names) == len(SHAPES)
    page = (ROOT / "docs/reference/json.md").read_text(encoding="utf-8")
    for shape, keys in SHAPES.items():
        assert shape.lower() in page.lower(), shape
        assert all(key == "..." or f"`{key.rstrip('?')}`" in page for key in keys), shape
    assert all(f"`{key}`" in page for key in ALWAYS)


def test_the_plan_of_a_large_cluster_is_slim_and_whole_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, size = written(capsys, "plan", *LARGE)
    assert code == 0 and size < 250_000, f"{size:,} bytes"
    assert found["fits"] > 1000 and len(found["candidates"]) == 10 and len(found["refused"]) == 10
    assert found["candidates"][0]["plan"] == found["plan_text"]
    assert found["candidates"][0]["step_seconds"] == found["forecast"]["step_seconds"]["value"]
    _, whole, _ = written(capsys, "plan", *LARGE, "--all")
    assert len(whole["candidates"]) == 1000 and whole["profile"]["blocks"] and "profile" not in found
    assert {name: whole[name] for name in ("plan", "forecast", "fits")} == {
        name: found[name] for name in ("plan", "forecast", "fits")
    }
