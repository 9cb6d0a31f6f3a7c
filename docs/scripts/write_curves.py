"""Trains in several layouts and on one device and writes docs/curves.md with a picture of the loss curves.

`python docs/scripts/write_curves.py` runs `paceline train` for every run of RUNS, in fp32 and fp64; `--run NAME` one of
them. The losses are kept in docs/proofs/curves.json with the date and the version of torch. `--page` trains nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from proof_tasks import write_corpus

from paceline import svg
from paceline.report.charts import WIDTH, Line, line_chart
from paceline.spec.journal.reading import final_steps, read_journal
from paceline.spec.layout import Layout

DOCS = Path(__file__).parents[1]
KEPT, PAGE, PICTURE = DOCS / "proofs" / "curves.json", DOCS / "curves.md", DOCS / "images" / "curves.svg"
STEPS, DTYPES = 50, ("fp32", "fp64")
MODELS = {
    "decoder": '{ name = "llama-1m", hidden = 64, layers = 4, heads = 4, kv_heads = 2, ffn = 160 }',
    "experts": '{ name = "moe-2m", hidden = 64, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }',
}
SPEC = """
[task]
name = "curve"
model = {model}
data = {{ source = "{corpus}", seq_len = 48, cache_dir = "{cache}" }}
optimizer = {{ lr = 3e-3 }}
schedule = {{ kind = "cosine", warmup = "5 steps" }}
global_batch = "24 samples"
stop = "{steps} steps"
seed = 7

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
precision = "{dtype}"
micro_batch = 3
{layout}

[run]
dir = "{run_dir}"
verify = false
checkpoint_every = "none"
evaluate_every = "none"
"""
HEAD = """<!-- Written by docs/scripts/write_curves.py; run it again instead of editing. -->

# Curves

The same task trained for {steps} steps by `paceline train` in several layouts, in real processes, and on one device:
the losses of the journals, step by step. A decoder of 4 layers and width 64 and one of 2 layers with 8 experts each
learn a small text; AdamW, clipping, cosine schedule, 24 samples per step.

![Loss curves of all layouts, and their relative differences from one device](images/curves.svg)

| model | layout | loss, first to last step | fp32, largest relative difference | fp64 |
|---|---|---:|---:|---:|
"""
TAIL = """
The relative difference of a step is that of its loss from one device's loss at the same step. In fp32 sums in another
order round differently, and training carries this on from step to step; in fp64 the same curves agree to the last
digits, so what is left in fp32 is rounding and nothing else. `make test-deep` trains two of the layouts again.

Trained on {date} with torch {torch}.
"""


@dataclass(frozen=True)
class Curve:
    """A model and the layout that it is trained in."""

    model: str
    layout: Layout

    @property
    def name(self) -> str:
        """The layout in words."""
        return str(self.layout)


RUNS = {
    "decoder-one": Curve("decoder", Layout()),
    "dp": Curve("decoder", Layout(dp_replicate=8)),
    "shard-tp": Curve("decoder", Layout(dp_shard=4, tp=2)),
    "pp-tp-shard": Curve("decoder", Layout(pp=2, tp=2, dp_shard=2)),
    "cp-shard": Curve("decoder", Layout(cp=2, dp_shard=4)),
    "experts-one": Curve("experts", Layout()),
    "ep-shard": Curve("experts", Layout(ep=4, dp_shard=8)),
}
REFERENCES = {"decoder": "decoder-one", "experts": "experts-one"}
ON_THE_CURVE = {"fp32": 1e-5, "fp64": 1e-12}  # largest relative difference of a loss within STEPS


def train(curve: Curve, dtype: str, folder: Path, steps: int = STEPS) -> list[float]:
    """Train and return the loss of every step. Raises CalledProcessError, with stderr shown, where training fails."""
    run_dir = folder / f"{curve.model}-{curve.name}-{dtype}".replace(" ", "-")
    spec = folder / f"{run_dir.name}.toml"
    layout = "\n".join(f"{axis} = {degree}" for axis, degree in dataclasses.asdict(curve.layout).items())
    spec.write_text(
        SPEC.format(
            model=MODELS[curve.model], corpus=write_corpus(folder), cache=folder / "cache", steps=steps, dtype=dtype,
            devices=curve.layout.devices, layout=layout, run_dir=run_dir,
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "paceline", "train", str(spec)]
    # Threads that wait for work sleep: beside other processes, spinning takes more than the work.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    losses = [float(record["loss"]) for record in final_steps(list(read_journal(run_dir)))]
    assert len(losses) == steps, f"{len(losses)} steps of {steps} in {run_dir}"
    return losses


def differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the relative difference of every step's loss."""
    return [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True)]


def page(kept: Mapping[str, Any]) -> str:
    """Return the page for the losses that are kept."""
    rows = []
    for name, curve in RUNS.items():
        if name not in kept["runs"]:
            continue
        losses = kept["runs"][name]
        span = f"{losses['fp32'][0]:.4f} to {losses['fp32'][-1]:.4f}"
        largest = [max(_from_reference(kept, name, dtype)) for dtype in DTYPES]
        shown = ["–", "–"] if name in REFERENCES.values() else [f"{size:.0e}" if size else "0" for size in largest]
        rows.append(f"| {curve.model} | {curve.name} | {span} | {' | '.join(shown)} |")
    return HEAD.format(steps=STEPS) + "\n".join(rows) + "\n" + TAIL.format(**kept)


def _from_reference(kept: Mapping[str, Any], name: str, dtype: str) -> list[float]:
    runs = kept["runs"]
    return differences(runs[name][dtype], runs[REFERENCES[RUNS[name].model]][dtype])


# ---- picture --------------------------------------------------------------------------------------------------------

COLOURS = ("#2360c5", "#12937f", "#e0932b", "#8457d8", "#cf5388", "#7b8794")
STYLE = """svg{overflow:visible;font:12px system-ui,sans-serif}text{fill:#58616c}.grid{stroke:#e9ecf0}
.axis{stroke:#737b86}.line{fill:none;stroke-width:1.6;stroke-linejoin:round}.end{font-weight:600}.tip{opacity:0}
.line.one{stroke:#c3c9d1;stroke-width:7;stroke-linecap:round}.end.one{fill:#737b86}.title{font-weight:600;fill:#171a1f}
"""
LABELS = 60  # pixels to the right of a chart that the names of lines need beyond its own margin
HEIGHT, GAP = 250, 44


def picture(kept: Mapping[str, Any]) -> str:
    """Return the picture as SVG: curves above, relative differences in fp32 and in fp64 below."""
    names = [name for name in RUNS if name in kept["runs"]]
    layouts = [name for name in names if name not in REFERENCES.values()]
    styles = {name: f"k{index}" for index, name in enumerate(layouts)} | dict.fromkeys(REFERENCES.values(), "one")
    drawn = [*(name for name in names if name not in layouts), *layouts]  # thin lines on top of the thick one
    curves = [Line(_label(name), _points(kept["runs"][name]["fp32"]), styles[name]) for name in drawn]
    parts = [_panel(0, "Loss in fp32", curves, log=False)]
    for place, dtype in enumerate(DTYPES, start=1):
        lines = [Line(_label(name), _points(_from_reference(kept, name, dtype)), styles[name]) for name in layouts]
        lines = [Line(line.label, [point for point in line.points if point[1]], line.style) for line in lines]
        title = f"Relative difference from one device in {dtype} (steps without any are left out)"
        parts.append(_panel(place, title, lines, log=True))
    colours = "".join(
        f".line.k{i}{{stroke:{colour}}}.end.k{i}{{fill:{colour}}}.dot.k{i}{{fill:{colour}}}"
        for i, colour in enumerate(COLOURS)
    )
    width, height = WIDTH + LABELS, 3 * (HEIGHT + GAP)
    paper = svg.element("rect", width=width, height=height, fill="#fff")
    label = "loss curves of all layouts, and their relative differences from one device"
    return svg.picture(width, height, label, [paper, *parts], rules=STYLE + colours, fixed=True) + "\n"


def _panel(place: int, title: str, lines: Sequence[Line], *, log: bool) -> str:
    top = place * (HEIGHT + GAP)
    chart = line_chart(lines, label=title, x_label="step", y_label="", y_format=_number, log=log, height=HEIGHT)
    placed = chart.replace("<svg ", f'<svg x="0" y="{top + 28}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    return svg.text(4, top + 20, title, "title") + placed


def _number(value: float) -> str:
    return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:g}"


def _points(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in enumerate(values, start=1)]


def _label(name: str) -> str:
    curve = RUNS[name]
    return f"{curve.model}, one device" if name in REFERENCES.values() else curve.name


# ---- command --------------------------------------------------------------------------------------------------------


def read_kept() -> dict[str, Any]:
    """Return the losses that are kept: {date, torch, runs: {name: {dtype: losses}}}."""
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"runs": {}}
    return kept


def main(words: Sequence[str] | None = None) -> None:
    """Train what is asked for, keep the losses, write page and picture."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=RUNS, action="append", help="only this run; may be given again")
    parser.add_argument("--page", action="store_true", help="train nothing, write page and picture alone")
    options = parser.parse_args(words)
    kept = read_kept()
    with tempfile.TemporaryDirectory(prefix="paceline-curves-") as folder:
        for name in [] if options.page else options.run or RUNS:
            kept["runs"][name] = {dtype: train(RUNS[name], dtype, Path(folder)) for dtype in DTYPES}
            kept |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
            print(f"{name}: {kept['runs'][name]['fp32'][0]:.4f} to {kept['runs'][name]['fp32'][-1]:.4f}", flush=True)
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")
    PICTURE.write_text(picture(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
