"""Runs beside each other: at the same step, with what differs between them, and how sure a difference is."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals
from runs import in_process

from paceline.cli.json import shapes
from paceline.cli.json.shapes import undeclared
from paceline.errors import ConfigError
from paceline.observe.compare.page import compare_html
from paceline.observe.compare.runs import ComparedFigure, RunComparison, compare_runs
from paceline.observe.compare.short_names import short_names
from paceline.observe.compare.texts import compare_lines


def run(folder: Path, name: str, seed: int, lower: float = 0.0, lr: float = 0.001, steps: int = 200, **of: Any) -> Path:
    """Write a run whose loss is so much lower; runs with one `data` seed see the same noise of the data."""
    writer = journals.Writer(seed)
    writer.begin(steps=300)
    spec = writer.records[0]["spec"]["task"]
    spec["seed"], spec["optimizer"] = of.get("task_seed", 7), {"name": "adamw", "lr": lr}
    writer.steps(1, steps)
    shared = random.Random(99)
    for record in writer.records:
        if record["kind"] == "step":
            record["loss"] += shared.gauss(0, of.get("shared", 0.0)) - lower
            record["seconds"] = {**record["seconds"], "total": record["seconds"]["total"] * of.get("slower", 1.0)}
    return journals.write(folder / name, writer.records)


def figure(found: RunComparison, name: str, index: int = 1) -> ComparedFigure:
    return next(each for each in found.figures if each.figure == name and each.run == found.runs[index].name)


def test_a_difference_beyond_noise_is_called_one(tmp_path: Path) -> None:
    found = compare_runs([run(tmp_path, "a", 1), run(tmp_path, "b", 2, lower=0.1, slower=1.1)])
    loss, speed = figure(found, "training loss"), figure(found, "step seconds")
    assert loss.lower == "b" and loss.sure is not None and loss.sure > 0.99
    assert loss.better == "" and speed.better == "", "one run of each tells nothing of how far two of a kind are apart"
    assert loss.plus_minus is not None and abs(loss.difference + 0.1) < loss.plus_minus < 0.08
    assert speed.lower == "a" and speed.relative == pytest.approx(0.1, abs=0.02)
    assert (
        "lower in b" in loss.text
        and "another run of each" in loss.text
        and found.step == 200
        and found.last_steps == 20
    )


def test_a_difference_within_noise_is_not(tmp_path: Path) -> None:
    better = 0
    for seed in range(6):
        found = compare_runs([run(tmp_path, f"a{seed}", seed), run(tmp_path, f"b{seed}", 100 + seed)])
        better += bool(figure(found, "training loss").lower)
    assert better <= 1
    assert "not told from noise" in figure(found, "training loss").text or better


def test_noise_that_runs_share_is_no_noise_of_their_difference(tmp_path: Path) -> None:
    alone = compare_runs([run(tmp_path, "a", 1), run(tmp_path, "b", 2, lower=0.1)])
    shared = compare_runs([run(tmp_path, "c", 1, shared=1.0), run(tmp_path, "d", 2, lower=0.1, shared=1.0)])
    widths = [figure(found, "training loss").plus_minus for found in (alone, shared)]
    assert widths[0] == pytest.approx(widths[1])


def test_runs_of_different_length_are_held_against_each_other_at_the_same_step(tmp_path: Path) -> None:
    """A longer run is no better for being longer."""
    found = compare_runs([run(tmp_path, "short", 1, steps=60), run(tmp_path, "long", 1, steps=250)])
    assert found.step == 60 and figure(found, "training loss").difference == 0
    assert figure(found, "training loss").lower == "" and found.runs[1].steps == 250


def test_runs_that_differ_by_their_seed_alone_tell_the_noise(tmp_path: Path) -> None:
    paths = [run(tmp_path, f"a{seed}", seed, lower=0.3 * seed, task_seed=seed) for seed in (1, 2)]
    paths += [run(tmp_path, f"b{seed}", 9 + seed, lower=0.5 + 0.3 * seed, lr=0.01, task_seed=seed) for seed in (1, 2)]
    found = compare_runs(paths)
    assert [each.group for each in found.runs] == [0, 0, 2, 2]
    between = figure(found, "training loss", 2)
    assert between.noise == "seeds" and between.better == "" and between.difference == pytest.approx(-0.5, abs=0.05)
    assert figure(found, "training loss", 1).noise == "steps"
    assert "several runs" in found.note


def pair_of_kinds(folder: Path, draw: random.Random, count: int, each: int) -> list[Path]:
    """Write runs of two kinds that are equally good: seeds move losses, and the machine's mood moves times."""
    folder.mkdir()
    return [
        run(folder, f"{kind}{number}", draw.randrange(10**6), lower=draw.gauss(0, 0.05), lr=(0.001, 0.01)[kind],
            steps=each, task_seed=10 * kind + number, slower=math.exp(draw.gauss(0, 0.1)))
        for kind in (0, 1) for number in range(count)
    ]  # fmt: skip


def test_of_runs_that_are_equally_good_none_is_called_better_more_often_than_said(tmp_path: Path) -> None:
    draw, better, lower = random.Random(11), {"training loss": 0, "step seconds": 0}, 0
    for number in range(100):
        paths = pair_of_kinds(tmp_path / str(number), draw, 3, each=40)
        single, several = compare_runs([paths[0], paths[3]]), compare_runs(paths)
        assert not any(each.better for each in single.figures)
        lower += bool(figure(single, "training loss").lower)
        for name in better:
            assert figure(several, name, 3).noise == "seeds"
            better[name] += bool(figure(several, name, 3).better)
    assert lower > 20, "the noise of steps alone does not tell it"
    assert max(better.values()) <= 10, f"{better} of 100, where 5 are expected"


def test_a_kind_that_is_better_is_called_so(tmp_path: Path) -> None:
    paths = [run(tmp_path, f"a{seed}", seed, lower=0.02 * seed, task_seed=seed) for seed in (1, 2, 3)]
    paths += [run(tmp_path, f"b{seed}", 9 + seed, lower=0.5 + 0.02 * seed, lr=0.01, task_seed=seed, slower=1.2)
              for seed in (1, 2, 3)]  # fmt: skip
    found = compare_runs(paths)
    assert figure(found, "training loss", 3).better == "b1" and "b1 is better" in figure(found, "training loss", 3).text
    assert figure(found, "step seconds", 3).better == "a1"


def test_runs_with_one_seed_are_one_piece_of_evidence_of_a_loss_and_several_of_a_time(tmp_path: Path) -> None:
    """The same run made again has the same losses: that nothing lies between them is not how noisy seeds are."""
    paths = [run(tmp_path, name, 1) for name in ("a", "again")]
    found = compare_runs([*paths, run(tmp_path, "b", 2, lower=0.01, lr=0.01)])
    loss, speed = figure(found, "training loss", 2), figure(found, "step seconds", 2)
    assert loss.noise == "steps" and loss.better == ""
    assert speed.noise == "seeds"


def test_what_differs_is_named_and_nothing_else(tmp_path: Path) -> None:
    found = compare_runs([run(tmp_path, "a", 1), run(tmp_path, "b", 2, lr=0.01, task_seed=8)])
    assert {each.name: each.values for each in found.differences} == {
        "spec.task.optimizer.lr": ("0.001", "0.01"), "spec.task.seed": ("7", "8"),
    }  # fmt: skip


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    a = run(tmp_path, "a", 1)
    empty = journals.write(tmp_path / "empty", journals.complete()[:2])
    for paths, words in (([a], "1 run to compare"), ([a, tmp_path], "not a run"), ([a, empty], "no step"),
                         ([a, tmp_path / "x" / ".." / a.name], "named twice")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            compare_runs(paths)
    bad = journals.write(tmp_path / "bad", journals.failed())
    found = compare_runs([a, bad])
    assert math.isnan(found.runs[1].loss or 0.0), "what its loss was before it diverged is not what it is"
    assert "training loss" not in {each.figure for each in found.figures}
    page = compare_html(found)
    assert "no number" in page and "no number" in "\n".join(compare_lines(found))
    assert all(math.isfinite(each.difference) for each in found.figures)


def test_the_command_tells_it_for_people_and_machines(tmp_path: Path) -> None:
    assert len(compare_runs([run(tmp_path, "c.toml", 1), run(tmp_path, "d.toml", 2)]).runs) == 2, "runs for all that"
    paths = [run(tmp_path, "a", 1), run(tmp_path, "b", 2, lower=0.1, lr=0.01)]
    told = in_process("compare", *paths)
    assert told.returncode == 0 and "lower in b" in told.stdout and "spec.task.optimizer.lr" in told.stdout
    found = json.loads(in_process("compare", *paths, "--json").stdout)
    assert not undeclared(shapes.COMPARED_RUNS, set(found) - {"format", "exit_code"})
    assert found["figures"][0]["lower"] == "b" and found["runs"][1]["name"] == "b"
    assert in_process("compare", paths[0]).returncode == 2


def test_the_page_tells_differences_in_their_units(tmp_path: Path) -> None:
    """It said "peak bytes +4.739e+06" and "step seconds +0.05745"."""
    found = compare_runs([run(tmp_path, "a", 1), run(tmp_path, "b", 2, slower=1.2)])
    page, speed = compare_html(found), figure(found, "step seconds")
    assert f"<td>{speed.called}</td>" in page and speed.called == "step time"
    assert speed.difference_text in page and speed.difference_text.endswith("s") and speed.noise_text in page
    assert "step seconds<" not in page and "peak bytes<" not in page


def test_what_differs_keeps_to_a_hundred_columns(tmp_path: Path) -> None:
    """The whole command, say: two long values beside a long name took 120."""
    for name, word in (("a", "first"), ("b", "other")):
        path = run(tmp_path, name, 1) / "journal" / "0001.jsonl"
        first, rest = path.read_text().split("\n", 1)
        begun = json.loads(first)
        begun["spec"]["task"]["data"] = {"source_of_the_documents_that_are_read": f"{word}/{'folder/' * 9}"}
        path.write_text(f"{json.dumps(begun)}\n{rest}")
    lines = compare_lines(compare_runs([tmp_path / "a", tmp_path / "b"]))
    [told] = [line for line in lines if "documents" in line]
    assert len(told) <= 100 and "first/folder" in told and "other/folder" in told and told.count("…") == 2


def test_twenty_runs_on_one_page_and_no_word_of_theirs_is_code(tmp_path: Path) -> None:
    paths = [run(tmp_path, f"run-{index}", index, steps=40, lr=index) for index in range(19)]
    evil = run(tmp_path, "<img src=x onerror=alert(1)>", 3, steps=40)
    page = compare_html(compare_runs([*paths, evil]))
    assert "<img" not in page and "&lt;img" in page and page.count('class="line c') == 40


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a", "b"], ["a", "b"]),
        (["sweep-lr0-seed000", "sweep-lr1-seed001"], ["…lr0-seed000", "…lr1-seed001"]),
        (["x" * 40 + "1", "x" * 40 + "2"], ["…" + "x" * 11 + "1", "…" + "x" * 11 + "2"]),
        (["1" + "x" * 40, "2" + "x" * 40], ["1. …" + "x" * 9, "2. …" + "x" * 9]),
        (["a-very-long-name-of-a-run"], ["…ame-of-a-run"]),
        ([], []),
    ],
)
def test_names_beside_curves_can_be_told_apart(names: list[str], short: list[str]) -> None:
    """Of twenty curves all were called "sweep-lr0-seed", since their labels were cut off."""
    assert short_names(names) == short and all(len(name) <= 13 for name in short)
