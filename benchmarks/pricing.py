"""How fast plans are priced and searched: `OMP_NUM_THREADS=1 python benchmarks/pricing.py [--quick] [--json]`; no GPU.

Five figures. Layouts priced per second, memory and time of each; the complete search for Llama 3.1 405B on 16,384 H100
in a process that has only just started, Python's own start included; the one for a model of 530B on 5,120 A100, beside
what Calculon states of its own search; `paceline plan` of a small task; and of a user's own module that had to be
traced (examples/digits_model.py), again, beside `import numpy` in the same minute. Paceline's modules are compiled
before, as pip does when it installs: numpy is, and where PYTHONDONTWRITEBYTECODE is set a checkout would be compiled at
every start.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paceline
from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.pricing import needed_bytes, step_seconds
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.search.space import Space, allowed_layouts, base_plan, recompute_modes
from paceline.spec.cluster import ClusterSpec
from paceline.spec.plan import PlanSpec
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder

EXAMPLES = Path(__file__).parents[1] / "examples"
DEVICES, BATCH, SEQUENCE = 16_384, 2048, 8192
REPEATS = 5
AIM = 0.5  # seconds of the second plan of a module that had to be traced
SEARCH = """
import time
from paceline.spec.cluster import ClusterSpec
from paceline.cluster.resolve import resolve_cluster
from paceline.spec.plan import PlanSpec
from paceline.plan.search.search import search
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder
from paceline.spec.task import ModelSpec
profile = profile_decoder(resolve_decoder(ModelSpec("llama-405b"), 0, {sequence}), {sequence})
cluster, _ = resolve_cluster(ClusterSpec(device="h100-sxm", devices={devices}))
found = search(profile, cluster, PlanSpec(), batch_samples={batch}, steps=1)
print(len(found.candidates) + len(found.refused), found.best.plan, sep="|")
"""

# The README of calculon-ai/calculon at 013a664 says "~1 min" of `llm-optimal-execution models/turing-530B.json 5128
# 2520 float16 systems/a100_80g.json`, on all cores of a machine it does not name. Its space is its own; 5,128 devices
# divide into no layouts of ours, so this takes 5,120 and a batch of 2,560.
CALCULON_SECONDS = 60
TURING = """
from paceline.spec.cluster import ClusterSpec
from paceline.cluster.resolve import resolve_cluster
from paceline.spec.plan import PlanSpec
from paceline.plan.search.search import search
from paceline.task.profile.transformer import TransformerShape
profile = TransformerShape("530B", layers=105, hidden=20480, ffn=81920, heads=128, kv_heads=128, head_dim=160,
                           vocab=51200, seq_len=2048, flash=False, dropout=True).profile()
cluster, _ = resolve_cluster(ClusterSpec(device="a100-80", devices=5120))
found = search(profile, cluster, PlanSpec(), batch_samples=2560, steps=1)
print(len(found.candidates) + len(found.refused), found.best.plan, sep="|")
"""


def priced_per_second(repeats: int) -> dict[str, Any]:
    """Return how many plans of the whole space are priced in a second of one core: memory and time of each."""
    profile = profile_decoder(resolve_decoder(ModelSpec("llama-405b"), 0, SEQUENCE), SEQUENCE)
    cluster, _ = resolve_cluster(ClusterSpec(device="h100-sxm", devices=DEVICES))
    context, constraints = PricedTask(profile, cluster, BATCH, 1), PlanSpec()
    base, modes = base_plan(constraints, "bf16", BATCH), recompute_modes(context, constraints)
    layouts = allowed_layouts(context, constraints, base, [])
    columns = Space(context, constraints, base, modes, []).columns(layouts)
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        needed_bytes(context, columns)
        step_seconds(context, columns)
        seconds.append(time.process_time() - began)
    return {"plans": len(columns), "layouts": len(layouts), "per_second": len(columns) / statistics.median(seconds)}


def cold(
    command: list[str], repeats: int, folder: Path | None = None, environ: dict[str, str] | None = None
) -> tuple[dict[str, float], str]:
    """Return the median wall and processor seconds of a process from its start to its end, and what it printed."""
    wall, used, printed = [], [], ""
    for _ in range(repeats):
        before, began = os.times(), time.perf_counter()
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=environ).stdout
        after = os.times()
        wall.append(time.perf_counter() - began)
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return {"wall_seconds": statistics.median(wall), "processor_seconds": statistics.median(used)}, printed


def planned_again(repeats: int) -> dict[str, Any]:
    """Return what the first plan of a module that is traced takes, the second one, and importing numpy beside it.

    With them the part of the first that the second takes, both of processor and both of this run.
    """
    own = ["task.model.name=digits_model:build", "task.data.source=digits", "cluster.device=h100-sxm",
           "cluster.devices=8"]  # fmt: skip
    command = [sys.executable, "-m", "paceline", "plan", *(word for pair in own for word in ("--set", pair))]
    with tempfile.TemporaryDirectory() as cache:
        here = {**os.environ, "XDG_CACHE_HOME": cache}
        first, _ = cold(command, 1, EXAMPLES, here)
        again, _ = cold(command, repeats, EXAMPLES, here)
    numpy, _ = cold([sys.executable, "-c", "import numpy"], repeats)
    ratio = again["processor_seconds"] / first["processor_seconds"]
    return {"first": first, "again": again, "import_numpy": numpy, "again_over_first": ratio}


def main() -> None:
    """Measure, and print lines for people or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="each figure once")
    options = parser.parse_args()
    as_json, repeats = options.json, 1 if options.quick else REPEATS
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)
    priced = priced_per_second(repeats)
    code = SEARCH.format(sequence=SEQUENCE, devices=DEVICES, batch=BATCH)
    searched, printed = cold([sys.executable, "-c", code], repeats)
    count, _, best = printed.strip().partition("|")
    turing, printed = cold([sys.executable, "-c", TURING], repeats)
    of_turing, _, best_turing = printed.strip().partition("|")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("A paceline is a line of riders who share the work. " * 4000, "utf-8")
        small = [f"task.data.source={text}", "task.model=llama-11m", "cluster.device=h100-sxm", "cluster.devices=8"]
        sets = [word for pair in small for word in ("--set", pair)]
        planned, _ = cold([sys.executable, "-m", "paceline", "plan", *sets], repeats)
    again = planned_again(repeats)
    if as_json:
        print(json.dumps({"priced": priced, "search_405b": {**searched, "plans": int(count)},
                          "search_530b": {**turing, "plans": int(of_turing)}, "plan_small": planned,
                          "plan_own": again}))  # fmt: skip
        return
    space = f"{priced['plans']:,} plans of {priced['layouts']:,} layouts"
    print(f"priced        {priced['per_second']:,.0f} plans/s on one core, memory and time ({space})")
    print(f"search        llama-405b on {DEVICES:,} x h100-sxm: {searched['wall_seconds']:.2f} s from a cold start"
          f" ({searched['processor_seconds']:.2f} s of processor), {int(count):,} plans, all of them")  # fmt: skip
    print(f"best          {best}")
    print(f"search        530B on 5,120 x a100-80: {turing['wall_seconds']:.2f} s from a cold start, {int(of_turing):,}"
          f" plans; Calculon states about {CALCULON_SECONDS} s of its own space on 5,128")  # fmt: skip
    print(f"best          {best_turing}")
    print(f"plan          llama-11m on 8 x h100-sxm: {planned['wall_seconds']:.2f} s from a cold start"
          f" ({planned['processor_seconds']:.2f} s of processor)")  # fmt: skip
    spent = {name: again[name]["processor_seconds"] for name in ("first", "again", "import_numpy")}
    print(f"plan          a module of one's own, the second time: {spent['again']:.2f} s of processor, the first time"
          f" {spent['first']:.2f} (ratio {again['again_over_first']:.3f}); `import numpy` alone"
          f" {spent['import_numpy']:.2f}; {AIM:.1f} s is aimed at")  # fmt: skip


if __name__ == "__main__":
    main()
