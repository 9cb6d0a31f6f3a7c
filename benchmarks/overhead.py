"""Steps per second of Paceline against a loop by hand, Accelerate, Lightning Fabric and the Hugging Face Trainer.

    python benchmarks/overhead.py [--quick] [--model llama-1m] [--rounds 40] [--processes 1,2] [--json OUT] [--save]

All train the same model on the same rows with the same optimizer on the CPU. Contenders take turns of a few steps, in
an order that rotates, so that what else the machine does hits all alike; a contender's figure is the median over the
rounds of its time over the bare loop's time in the same round. "bare again" is the bare loop a second time: how far its
ratio is from 1 is what the measurement cannot see. The loss of the last step shows that all do the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import keep, machine
from race import contenders
from race.contenders import Job
from race.contest import WARM_UP_STEPS, Entry, Row, compete, table

BASELINE, CONTROL = "bare", "bare again"
TITLES = {
    "bare": "loop by hand",
    "bare again": "loop by hand, again",
    "paceline": "Paceline",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "trainer": "HF Trainer",
}


@dataclass(frozen=True)
class Setting:
    """A way of spreading the work, and who takes part."""

    title: str
    processes: int
    axis: str
    names: tuple[str, ...]


def settings_of(processes: list[int], names: list[str], sharded: bool) -> list[Setting]:
    """Return the settings to measure. Only the loop by hand and Paceline take part in the sharded one."""
    everyone = (BASELINE, CONTROL, *names)
    found = []
    for count in processes:
        title = "1 process" if count == 1 else f"{count} processes, replicated"
        found.append(Setting(title, count, "dp_replicate", everyone))
        if sharded and count > 1:
            some = tuple(name for name in everyone if name in (BASELINE, CONTROL, "paceline"))
            found.append(Setting(f"{count} processes, sharded", count, "dp_shard", some))
    return found


def measure(setting: Setting, options: argparse.Namespace) -> list[Row]:
    """Return one row per contender of the setting."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        entries = [_entry(name, setting, _job(setting, options, Path(folder, name))) for name in setting.names]
        return compete(setting.title, entries, setting.processes, options.rounds, options.steps)


def _job(setting: Setting, options: argparse.Namespace, run_dir: Path) -> Job:
    return Job(
        model=options.model,
        seq_len=options.seq_len,
        vocab=options.vocab,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        steps=WARM_UP_STEPS + options.rounds * options.steps,
        processes=setting.processes,
        threads=options.threads,
        precision=options.precision,
        run_dir=str(run_dir),
    )


def _entry(name: str, setting: Setting, job: Job) -> Entry:
    sharded = setting.axis == "dp_shard"
    if name in (BASELINE, CONTROL):
        return Entry(name, contenders.bare_sharded if sharded else contenders.bare, {"job": job})
    if name == "paceline":
        layout = {setting.axis: setting.processes, "zero": 3 if sharded else 0}
        return Entry(name, contenders.paceline_loop, {"job": job, "plan": layout})
    return Entry(name, contenders.LOOPS[name], {"job": job})


def document(rows: list[Row], options: argparse.Namespace, facts: dict[str, Any]) -> str:
    """Return the Markdown page of a result."""
    return "\n".join(
        [
            "# Overhead of training loops on the CPU",
            "",
            f"`python benchmarks/overhead.py {' '.join(sys.argv[1:])}`",
            "",
            f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']} · "
            f"{options.model}, {options.micro_batch} x {options.accumulation} rows of {options.seq_len} tokens and "
            f"{options.threads} thread(s) per process, {options.precision} · "
            f"{options.rounds} rounds of {options.steps} steps",
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
    known = list(contenders.LOOPS)[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1m", help="a named size of the built-in decoder")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--micro-batch", type=int, default=4, help="rows per forward pass and process")
    parser.add_argument("--accumulation", type=int, default=2, help="forward passes per step")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process, the same for all")
    parser.add_argument("--processes", default="1,2", help="world sizes, such as 1,2")
    parser.add_argument("--contenders", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--sharded", action=argparse.BooleanOptionalAction, default=True, help="also FSDP2")
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 measures the sharded setting only: elsewhere every library computes something else in bf16",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything works")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/overhead.md, and figures/overhead.json"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.seq_len, options.micro_batch = 3, 2, 16, 1
    options.processes = [int(count) for count in options.processes.split(",")]
    options.contenders = options.contenders.split(",")
    if unknown := set(options.contenders) - set(known):
        parser.error(f"--contenders: unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


def main(arguments: list[str]) -> int:
    """Measure, print the table and write what was asked for; return 1 where a contender did other work."""
    options = parse(arguments)
    rows: list[Row] = []
    for setting in settings_of(options.processes, options.contenders, options.sharded):
        if options.precision == "bf16" and setting.axis != "dp_shard":
            continue
        rows += (measured := measure(setting, options))
        print("\n".join(table(measured, TITLES).splitlines()[2:]), file=sys.stderr)
    facts = machine()
    result = {"machine": facts, "options": vars(options), "rows": [asdict(row) for row in rows]}
    print(table(rows, TITLES))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.save:
        keep("overhead", result, document(rows, options, facts))
    return 0 if all(row.same_work for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
