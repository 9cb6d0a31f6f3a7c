"""What a page says of a saved benchmark is what is saved."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = {
    "`reform`, with copies": "reform, copies",
    "`reform`, with shards: from the newest checkpoint": "reform, shards",
    "`standby`": "standby",
    "`restart`": "restart",
    "a lost node of two, with copies": "a lost node, copies",
    "a lost node of two, with shards in the memory of both": "a lost node, shards",
}
PHASES = ("detect", "end", "start", "restore", "step")


def test_seconds_of_recovery_are_those_of_the_saved_benchmark() -> None:
    page = (ROOT / "docs" / "guide" / "run" / "surviving.md").read_text(encoding="utf-8")
    saved = json.loads((ROOT / "benchmarks" / "results" / "figures" / "recovery.json").read_text(encoding="utf-8"))
    assert "on four ranks" in page and saved["ranks"] == 4 and saved["machine"]["date"] in page
    for row, name in ROWS.items():
        (figures,) = re.findall(rf"^\| {re.escape(row)} \|([ \d.|]*)\|$", page, re.M)
        found = saved["contenders"][name]
        *told, lost = [float(figure) for figure in figures.split("|")]
        assert {lost} == {each["steps_lost"] for each in found["results"]}, row
        assert told == [round(found["total"]["median"], 2), *(round(found["phases"][each], 2) for each in PHASES)], row
    own = saved["contenders"]["torchrun, own store"]["total"]["median"]
    torchrun = saved["contenders"]["torchrun"]
    rounds = {2: "two", 3: "three", 5: "five"}[torchrun["rounds"]]
    assert f"| {own:.2f} |" in page and f"{rounds} rounds in turn" in page
    never, all_of_them = torchrun["never"], torchrun["rounds"]
    seconds = f"{torchrun['total']['median']:.2f}" if never < all_of_them else ""
    words = {0: seconds, 1: f"{seconds}, and once never, in {rounds} rounds", all_of_them: f"never, in {rounds} rounds"}
    told = words[never]
    assert f"a loop by hand that saves every step | {told} |" in page
    for told, name in (("Ray Train 2.60, the same loop", "Ray Train"),
                       ("torchft (nightly of 2026-10-26), which leaves the dead replica out", "torchft"),
                       ("the same with half a second of silence", "torchft, 0.5 s of silence"),
                       ("the supervisor killed, the run started again by hand at once", "cold")):  # fmt: skip
        assert f"| {told} | {saved['contenders'][name]['total']['median']:.2f} |" in page, name


def test_the_readme_tells_what_the_pages_of_accuracy_and_of_data_do() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "forecast-accuracy.md").read_text(encoding="utf-8")
    found = re.search(r"median table is off by ([\d.]+)%, the worst by ([\d.]+)%; (\d+) of (\d+) are worse", page)
    held = re.search(r"intervals of 80 % hold (\d+)%", page)
    series = re.search(r"median series is off by ([\d.]+)%", page)
    assert found and held and series
    median, worst, worse, tables = found.groups()
    for told in (f"off by {median} %", f"the worst by {float(worst):.0f} %", f"{worse} of {tables} are worse",
                 f"80 % intervals hold {held[1]} %", f"the median series by {series[1]} %"):  # fmt: skip
        assert told in readme, told
    parts = json.loads((ROOT / "benchmarks" / "results" / "figures" / "data.json").read_text(encoding="utf-8"))["parts"]
    resumes = parts["resume"]["rows"]
    assert f"within [{math.ceil(max(each['most'] for each in resumes.values()) * 1e3)} ms]" in readme


def test_the_readme_tells_what_the_grid_did() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    saved = json.loads((ROOT / "benchmarks" / "results" / "figures" / "forecast_grid.json").read_text(encoding="utf-8"))
    scores, tasks = saved["scores"], {row["task"] for row in saved["rows"]}
    regrets = [of for task in tasks if (of := saved["by_task"][task]["regret_mean"]) is not None]  # none of two rows
    for told in (f"On [{scores['rows']} layouts of ten tasks]",
                 f"in {regrets.count(0)} of {len(regrets)} choices ({scores['regret_worst'] * 100:.0f} % slower at",
                 f"time off by {scores['time_mape'] * 100:.1f} %",
                 f"{scores['learnt_time_mape'] * 100:.1f} % after learning",
                 f"memory by {scores['memory_mape'] * 100:.1f} %",
                 f"80 % intervals hold {scores['covered_80'] * 100:.0f} %"):  # fmt: skip
        assert told in readme, told


def test_the_page_on_scale_tells_what_many_real_ranks_did() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    saved = json.loads((ROOT / "benchmarks" / "results" / "figures" / "large_world.json").read_text(encoding="utf-8"))
    parts, ranks = saved["parts"], saved["ranks"]
    more = parts["group of saves"]["sockets"] - parts["groups of a layout"]["sockets"]
    assert f"each of {ranks} real ranks whose gloo connects on demand has {more:.0f} sockets" in page.replace("\n", " ")
    ring, tree = (parts[f"10 flags {where}"]["seconds"] for where in ("round gloo's ring", "along a tree"))
    assert f"ten flags take {ring:.1f} s round the ring and {tree:.1f} along the tree" in page
    assert (saved["failed"], saved["late"]) == (0, []) and parts["load"]["ranks"] == ranks
    assert saved["ends"] == {"killed": 1, "save ended, given up": ranks - 1}


def test_the_pages_of_the_gpu_say_what_was_measured() -> None:
    results = ROOT / "benchmarks" / "results"
    (found,) = json.loads((results / "figures" / "gpu" / "nvidia-h200.json").read_text(encoding="utf-8"))["results"]
    told = (results / "gpu.md").read_text(encoding="utf-8")
    ours, theirs = found["paceline"], found["by_hand"]
    for words in (
        f"{ours['step_seconds']:.4f} s a step, {ours['tokens_per_second']:,.0f} tokens/s, {ours['mfu_published']:.1%}"[
            :-1
        ],
        f"by hand {theirs['step_seconds']:.4f} s: {found['time_over_by_hand']:.4f} times",
        f"{ours['peak_bytes'] / 2**30:.1f} GiB allocated, by hand {theirs['peak_bytes'] / 2**30:.1f}",
    ):
        assert words in told
    rows = json.loads((results / "figures" / "gpu" / "grid.json").read_text(encoding="utf-8"))["rows"]
    off = [row["published"]["seconds"] / row["measured"]["seconds"] - 1 for row in rows if row.get("measured")]
    assert [f"{error:+.0%}" for error in off] == ["+1%", "-1%", "+7%", "-46%", "+12%"]
    assert "within +1, -1, +7 and, compiled, +12 %" in told and "llama-124m -46 %" in told
