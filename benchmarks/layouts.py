"""Steps per second of each axis alone against torch code written by hand for the same work, on two CPU processes.

    python benchmarks/layouts.py [--quick] [--axis tp,pp] [--rounds 15] [--json OUT] [--save]

By hand is FSDP2 for every ZeRO class, DistributedDataParallel, `parallelize_module`, torch's pipelining, keys gathered
in zigzag order, and experts that tokens reach by all-to-all; see `race/contenders.py` and `by_hand/`. Weights, rows,
their order, optimizer and clipping are the same, and the loss of the last step shows it. How contenders are compared
is said in `race/contest.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from by_hand.context import context_loop
from by_hand.expert import expert_loop
from by_hand.pipeline import pipeline_loop
from by_hand.tensor import tensor_loop
from common import keep, machine
from race.contenders import Job, bare, bare_sharded, paceline_loop
from race.contest import WARM_UP_STEPS, Entry, Row, compete, table

PROCESSES = 2
BASELINE, CONTROL, OURS = "by hand", "by hand again", "paceline"
TITLES = {BASELINE: "by hand", CONTROL: "by hand, again", OURS: "Paceline"}
FIRST_LAYERS, ALL_LAYERS = 3, 5  # of llama-1m, on the first pipeline stage and on both


@dataclass(frozen=True)
class Setting:
    """One axis alone: what Paceline is told, and the same by hand."""

    axis: str
    title: str
    by_hand: Callable[..., None]
    plan: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)  # of the loop by hand
    model: str = "llama-1m"
    shared: int = 1  # processes that work on the same rows
    accumulation: int = 2


def _piped(schedule: str) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "stages": f"{FIRST_LAYERS}+{ALL_LAYERS - FIRST_LAYERS}"}


def _stages(schedule: str) -> dict[str, Any]:
    return {"schedule": schedule, "first_layers": FIRST_LAYERS}


SETTINGS = (
    Setting("dp_replicate", "dp_replicate=2, DDP", bare, {"dp_replicate": 2}),
    *(
        Setting("dp_shard", f"dp_shard=2, ZeRO-{zero}, FSDP2", bare_sharded, {"dp_shard": 2, "zero": zero},
                {"zero": zero})
        for zero in (1, 2, 3)
    ),
    Setting("tp", "tp=2, parallelize_module", tensor_loop, {"tp": 2}, shared=2),
    *(
        Setting("pp", f"pp=2, {name}, torch's pipelining", pipeline_loop, _piped(schedule), _stages(schedule),
                shared=2, accumulation=4)
        for schedule, name in (("1f1b", "1F1B"), ("gpipe", "GPipe"))
    ),
    Setting("cp", "cp=2, gathered keys", context_loop, {"cp": 2, "zero": 3}, shared=2),
    Setting("ep", "ep=2 dp_shard=2, all_to_all_single", expert_loop, {"dp_shard": 2, "ep": 2, "zero": 3},
            model="moe-2m"),
)  # fmt: skip
AXES = tuple(dict.fromkeys(setting.axis for setting in SETTINGS))


def measure(setting: Setting, options: argparse.Namespace) -> list[Row]:
    """Return the setting's rows: by hand, by hand again, Paceline."""
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        job = Job(
            model=setting.model,
            seq_len=options.seq_len,
            vocab=options.vocab,
            micro_batch=options.micro_batch,
            accumulation=setting.accumulation,
            steps=WARM_UP_STEPS + options.rounds * options.steps,
            processes=PROCESSES,
            threads=options.threads,
            precision="fp32",
            run_dir=folder,
            shared=setting.shared,
            tied=False,
        )
        hand = {"job": job, **setting.options}
        entries = (
            Entry(BASELINE, setting.by_hand, hand),
            Entry(CONTROL, setting.by_hand, hand),
            Entry(OURS, paceline_loop, {"job": job, "plan": setting.plan}),
        )
        return compete(setting.title, entries, PROCESSES, options.rounds, options.steps)


def document(rows: list[Row], options: argparse.Namespace, facts: dict[str, Any]) -> str:
    """Return the Markdown page of a result."""
    return "\n".join(
        [
            "# Layouts against torch code written by hand, on the CPU",
            "",
            f"`python benchmarks/layouts.py {' '.join(sys.argv[1:])}`",
            "",
            f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']}, gloo · llama-1m and "
            f"moe-2m, untied, micro-batches of {options.micro_batch} rows of {options.seq_len} tokens, "
            f"{options.threads} thread(s) per process, fp32 · {options.rounds} rounds of {options.steps} steps",
            "",
            table(rows, TITLES),
            "",
            "Ratios are medians over rounds with 95 % intervals, each against the loop by hand in the same round;",
            "below 1 is faster. CPU time does not see waiting, but neither does it see what else the machine does.",
            "",
        ]
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", default=",".join(AXES), help=f"of {', '.join(AXES)}")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=256, help="by hand, tp takes even parts only")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows per forward pass")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process, the same for all")
    parser.add_argument("--quick", action="store_true", help="a few seconds per axis, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/layouts.md, and figures/layouts.json"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.seq_len, options.micro_batch = 3, 2, 16, 1
    options.axis = options.axis.split(",")
    if unknown := set(options.axis) - set(AXES):
        parser.error(f"--axis: unknown {', '.join(sorted(unknown))}; there are {', '.join(AXES)}")
    return options


def main(arguments: list[str]) -> int:
    """Measure, print the table and write what was asked for; return 1 where a contender did other work."""
    options = parse(arguments)
    rows: list[Row] = []
    for setting in SETTINGS:
        if setting.axis in options.axis:
            rows += (measured := measure(setting, options))
            print("\n".join(table(measured, TITLES).splitlines()[2:]), file=sys.stderr)
    facts = machine()
    result = {"machine": facts, "options": vars(options), "rows": [asdict(row) for row in rows]}
    print(table(rows, TITLES))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.save:
        keep("layouts", result, document(rows, options, facts))
    return 0 if all(row.same_work for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
