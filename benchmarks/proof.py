"""Seconds of the proof before training, against a bare `import torch` of the same run: small and large, fp32 and bf16.

    python benchmarks/proof.py [--rounds 5] [--quick] [--save] [--json FILE]

The proof is the one that `paceline train` makes: two steps in fp32, and one in bf16 where the plan is, of
`examples/stdlib-code.toml` on two devices and under layouts of more axes, in the degrees to which the twin lowers them.
Each round first imports torch in a process of its own. CPU time is that of all processes of the proof and of the one
that asks for it, which training has anyway; wall time depends on what else the machine does, which the load average
tells. The seconds of the proof are those that a run waits for it once it is planned: as in `train` and `verify`, the
process that the ranks are forked from imports torch while the layout's plan is made. Here that is a plan without a
search, so that less of the import is over by then than in `train`. The wall time of the command has all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Spread, keep, machine, median_of

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "examples" / "stdlib-code.toml"
LAYOUTS = {
    "the example": "dp_shard=2",
    "the example in bf16": "dp_shard=2,precision=bf16",
    "three axes": "dp_shard=2,tp=2,pp=2",
    "three axes in bf16": "dp_shard=2,tp=2,pp=2,precision=bf16",
    "the largest twin": "dp_replicate=2,dp_shard=4,cp=4,tp=2,pp=4",
    "the largest twin in bf16": "dp_replicate=2,dp_shard=4,cp=4,tp=2,pp=4,precision=bf16",
}
TARGET_SECONDS = {name: 5.0 if name.startswith("the example") else 20.0 for name in LAYOUTS}  # wall, two quiet cores


@dataclass(frozen=True)
class Taken:
    """What one command took: wall seconds, and CPU seconds of all its processes."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Row:
    """A proof over its rounds: medians, with the ratios to the import of torch in the same round."""

    name: str
    layout: str
    ran_as: str
    seconds: Spread
    proof_seconds: Spread
    cpu_seconds: Spread
    import_cpu_seconds: Spread
    cpu_ratio: Spread


def taken(work: Callable[[], Any]) -> tuple[Taken, Any]:
    """Return what `work()` took, with that of the processes it started and waited for, and what it returned."""
    began, before = time.perf_counter(), _cpu_seconds()
    result = work()
    return Taken(time.perf_counter() - began, _cpu_seconds() - before), result


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def import_torch() -> None:
    """Start a Python that imports torch and ends."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environ)


def prove(layout: str) -> dict[str, Any]:
    """Make the proof before training of the example under a layout, in a Python of its own, and return its record."""
    command = [sys.executable, __file__, "--prove", layout]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    proof: dict[str, Any] = json.loads(done.stdout)
    assert proof["equal"], proof["text"]
    return proof


def prove_here(layout: str) -> None:
    """Make the proof in this process, without a plan's search, and print its record.

    What imports torch begins as early as it does in `train` and `verify`: while the plan is made.
    """
    from paceline.session.ahead import proof_ahead
    from paceline.session.ready.prove import DTYPES, STEPS
    from paceline.spec.arguments import plan_spec
    from paceline.spec.load import load_spec
    from paceline.verify.process.start import plan_layout, verify_plan, verify_text
    from paceline.verify.twin.proof_parts import BRIEF

    with proof_ahead() as standby:
        spec = load_spec(SPEC)
        plan, vocab = plan_layout(spec, plan_spec(layout))
        proof = verify_plan(spec, plan, vocab, steps=STEPS, dtypes=DTYPES, scope=BRIEF, standby=standby)
    print(
        json.dumps({"equal": proof.equal, "ran_as": proof.ran_as, "seconds": proof.seconds, "text": verify_text(proof)})
    )


def measure(name: str, layout: str, rounds: int) -> Row:
    """Return what a proof took over some rounds; one before them, which reads files anew, does not count."""
    imports, proofs, alone, ran_as = [], [], [], ""
    for number in range(rounds + 1):
        bare, _ = taken(import_torch)
        whole, proof = taken(lambda: prove(layout))
        ran_as = proof["ran_as"]
        if number:
            imports.append(bare)
            proofs.append(whole)
            alone.append(float(proof["seconds"]))
        print(f"{name}, round {number}: {whole.seconds:.1f} s, {whole.cpu_seconds:.1f} s of CPU", file=sys.stderr)
    ratios = [whole.cpu_seconds / bare.cpu_seconds for whole, bare in zip(proofs, imports, strict=True)]
    return Row(
        name, layout, ran_as,
        median_of([whole.seconds for whole in proofs]), median_of(alone),
        median_of([whole.cpu_seconds for whole in proofs]),
        median_of([bare.cpu_seconds for bare in imports]), median_of(ratios),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| proof of | ran as | CPU time over `import torch` | CPU time, s | half of it, s | wall time, s"
        " | of the proof, s | aim, s |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratio, cpu = row.cpu_ratio, row.cpu_seconds.median
        lines.append(
            f"| {row.name} | {row.ran_as} | {ratio.median:.1f} ({ratio.low:.1f} to {ratio.high:.1f}) | {cpu:.1f}"
            f" | {cpu / 2:.1f} | {row.seconds.median:.1f} | {row.proof_seconds.median:.1f}"
            f" | {TARGET_SECONDS[row.name]:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print the table, and write it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of the small proof, to see that it works")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/proof.md, and figures/proof.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--prove", metavar="LAYOUT", help="make one proof and print its record")
    options = parser.parse_args(arguments)
    if options.prove:
        prove_here(options.prove)
        return 0
    layouts = {"the example": LAYOUTS["the example"]} if options.quick else LAYOUTS
    rounds = 1 if options.quick else options.rounds
    before = os.getloadavg()[0]
    rows = [measure(name, layout, rounds) for name, layout in layouts.items()]
    load = (before, os.getloadavg()[0])
    print(table(rows))
    facts = machine()
    result = {"machine": facts, "load": load, "rounds": rounds, "rows": [asdict(row) for row in rows]}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.save:
        where = f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']}"
        quiet = f"{rounds} rounds · load average {load[0]:.0f} at the start, {load[1]:.0f} at the end"
        head = "# The proof before training\n\n`python benchmarks/proof.py --save`"
        keep("proof", result, f"{head}\n\n{where} · {quiet}\n\n{table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
