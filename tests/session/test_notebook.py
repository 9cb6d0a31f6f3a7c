"""In a notebook: a loop on one device, fit on several with what cells define, an interrupt that saves, the report."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import environment, records_of, run_patiently

from paceline.report.notebook.table import inline_html
from paceline.said import end_line, say_line, say_over

KERNEL = ("nbclient", "ipykernel", "cloudpickle")
MISSING = [name for name in KERNEL if importlib.util.find_spec(name) is None]
needs_kernel = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra 'test')")

PAGE = Path(__file__).parents[2] / "docs/tutorials/bring/notebook.md"
# What a notebook's stop button does: the signal reaches the kernel's whole process group.
STOPPED = """
import dataclasses, os, signal, threading, time
from pathlib import Path

def stop_at(step, run_dir):
    while not any(f'"step":{step},' in path.read_text() for path in Path(run_dir).glob("journal/*")):
        time.sleep(0.02)
    os.killpg(os.getpgid(0), signal.SIGINT)

threading.Thread(target=stop_at, args=(3, "stopped")).start()
endless = dataclasses.replace(task, stop="1000000 steps")
paceline.fit(endless, cluster={**here, "devices": 2}, run={"dir": "stopped"}, verify=False)
"""
STILL_HERE = 'print("still here", len(losses))'


def told_by(cells: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return what each of some cells has shown, run one after the other in a kernel."""
    written, out = folder / "cells.json", folder / "out.json"
    written.write_text(json.dumps(cells))
    script = Path(__file__).parent / "notebook.py"
    # Under pytest a kernel would not show what processes of its own write.
    env = {name: value for name, value in environment().items() if name != "PYTEST_CURRENT_TEST"}
    ended = run_patiently([sys.executable, script, written, out], env=env)
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def cells_of_page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@needs_kernel
def test_a_notebook_trains_stops_shows_and_goes_on(tmp_path: Path) -> None:
    told = told_by([*cells_of_page(), STOPPED, STILL_HERE], tmp_path)
    defined, loop, again, fitted, stopped, still = told
    assert defined["error"] is None and loop["error"] is None, told
    first, *others = [part for part in loop["text"].replace("\n", "\r").split("\r") if part.startswith("step")]
    assert len(others) == 39 and "loss" in first
    assert loop["text"].count("\nstep") == 1, "all steps in one line, which is printed over"
    assert again["error"] is None and "steps made: 0" in again["text"] and "has all its 40 steps" in again["text"], (
        again
    )
    assert stopped["error"] == "HandedBack", stopped
    assert still["text"].strip() == "still here 40", "the kernel lives on"
    (end,) = records_of(tmp_path / "stopped", "run_ended")
    assert end["status"] == "requeue" and end["step"] >= 3
    saved = records_of(tmp_path / "stopped", "checkpoint")
    assert saved[-1]["step"] == end["step"], "what was done is saved"
    assert fitted["error"] is None and "40/40  loss" in fitted["text"], fitted
    assert "<table" in fitted["html"] and "step time" in fitted["html"] and "Finished" in fitted["html"]


AFTER_EACH_OTHER = """
import dataclasses, os, signal, threading, time
from pathlib import Path

def until(steps):
    return dataclasses.replace(task, stop=f"{steps} steps")

def fit(steps, name, devices=2):
    own = {"dir": name, "log_every": "1 steps"}
    paceline.fit(until(steps), cluster={**here, "devices": devices}, run=own, verify=False)

def loop(steps, name, most=10**6):
    run, made = paceline.Run(until(steps), cluster={**here, "devices": 1}, run={"dir": name}), []
    for batch in run:
        made.append(run.step(batch).step)
        if len(made) == most:
            break
    return made

def interrupts(name):
    def watch():
        while not any('"step":3,' in path.read_text() for path in Path(name).glob("journal/*")):
            time.sleep(0.02)
        os.killpg(os.getpgid(0), signal.SIGINT)
    threading.Thread(target=watch).start()

def ended(name):
    return paceline.load_run(name).records("run_ended")[-1]["step"]
"""
OTHER_DATA = """
class Waves:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.ones(8) * (index % 3), torch.tensor(index % 3)

whole = task
task = dataclasses.replace(task, data=Waves())
fit(12, "twice")
"""
WRONG_OBJECTIVE = """
calls = []
def objective(model, batch):
    calls.append(1)
    if len(calls) > 40:
        raise ValueError("a mistake of mine")
    return loss_of(model, batch)

task = dataclasses.replace(whole, objective=objective)
fit(100, "wrong", 1)
"""
# Each cell with the error that it ends with, if any, and the steps that are made in it.
CELLS: list[tuple[str, str, str]] = [
    ("fit(4, 'twice')", "", "1-4"),
    ("fit(4, 'twice')", "", ""),
    ("fit(6, 'twice')", "", "5-6"),
    ("fit(3, 'alone', 1)", "", "1-3"),
    ("fit(5, 'alone', 1)", "", "4-5"),
    ("print(loop(3, 'mixed'))", "", "1-3"),
    ("fit(5, 'mixed')", "", "4-5"),
    ("print(loop(7, 'mixed'))", "", "6-7"),
    ("interrupts('several'); fit(10**6, 'several')", "HandedBack", ""),
    ("fit(ended('several') + 2, 'several'); print('went on')", "", "on"),
    ("interrupts('looped'); loop(10**6, 'looped')", "HandedBack", ""),
    ("print(len(loop(ended('looped') + 2, 'looped')), 'went on')", "", "on"),
    ("interrupts('fitted'); fit(10**6, 'fitted', 1)", "HandedBack", ""),
    ("fit(ended('fitted') + 2, 'fitted', 1); print('went on')", "", "on"),
    ("print(loop(4, 'left', 2)); fit(4, 'left', 1)", "", "1-4"),
    (OTHER_DATA, "ConfigError", ""),
    ("task = whole; fit(8, 'twice')", "", "7-8"),
    (WRONG_OBJECTIVE, "ValueError", ""),
    ("task = whole; fit(3, 'mended', 1)", "", "1-3"),
]


@needs_kernel
def test_fits_and_loops_follow_each_other_in_one_kernel(tmp_path: Path) -> None:
    told = told_by([cells_of_page()[0], AFTER_EACH_OTHER, *[cell for cell, _, _ in CELLS]], tmp_path)
    assert told[0]["error"] is None and told[1]["error"] is None
    for (cell, error, steps), shown in zip(CELLS, told[2:], strict=True):
        assert (shown["error"] or "") == error, (cell, shown)
        if steps == "on":
            assert "went on" in shown["text"], (cell, shown)
        elif steps:
            first, last = steps.split("-")
            made = [part.split()[1] for part in re.split(r"[\r\n]", shown["text"]) if part.startswith("step ")]
            assert [made[0].partition("/")[0], made[-1].partition("/")[0]] == [first, last], (cell, shown)
    data, own = (shown["because"] for shown in told[2:] if shown["error"] in ("ConfigError", "ValueError"))
    assert "twice was trained on other data" in data and "500 samples then and 100 now" in data
    assert "a mistake of mine" in own


class Shown:
    """A stream that keeps what is written, as a notebook's cell does."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


def test_a_line_is_printed_over_until_another_one_is_said() -> None:
    shown: Any = Shown()
    say_line("begin", shown)
    say_over("step 1 of 10", shown)
    say_over("step 2", shown)
    say_line("a note", shown)
    say_over("step 3", shown)
    end_line(shown)
    end_line(shown)
    assert shown.text == "begin\nstep 1 of 10\rstep 2      \na note\nstep 3\n"


def test_what_a_table_shows_is_text_and_never_markup() -> None:
    page = inline_html("<b>", ["a & b"], ("x",), [("<script>",)])
    assert "<script>" not in page and "&lt;script&gt;" in page and "a &amp; b" in page and page.startswith("<div")
