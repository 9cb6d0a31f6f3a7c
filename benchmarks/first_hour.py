"""What a user types and waits for, the first time: a model fine-tuned, a classifier, a loop of one's own.

    python benchmarks/first_hour.py [--tasks finetune,loop] [--rounds 3] [--quick] [--json OUT] [--save]
    python benchmarks/first_hour.py --join JSON ... [--note TEXT] [--save]

Every contender of a task is a script, or a spec file, in `first_hour_tasks/`, as its own guide would write it: all
train the same model on the same data with AdamW at the same constant rate for as many steps of as many rows. Told of
each: the lines that a user writes (without empty ones and comments), seconds from the start of the process to the
first step, steps per second after it, the largest resident memory, and the metric on the same held-out data, which is
not the same to the last digit: rows come in another order. They take turns; figures are medians over rounds. Each is
one process on one core, the same for all, and with --device cuda on the GPU too, without the word that keeps it off.
Paceline's modules are compiled before, as pip does when it installs: the others' are, and where PYTHONDONTWRITEBYTECODE
is set a checkout would be compiled at every start.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import keep, machine

import paceline
from paceline.spec.journal.reading import read_records

TASKS = Path(__file__).parent / "first_hour_tasks"
TIMED = TASKS / "timed.py"
# What a script says to stay on the CPU, and what it says on a GPU.
ON_GPU = {"use_cpu=True, ": "", "Accelerator(cpu=True)": "Accelerator()", 'accelerator="cpu"': 'accelerator="cuda"',
          "model = Net()": 'model = Net().to("cuda")',
          "in loader:\n": "in loader:\n        tokens, labels = tokens.cuda(), labels.cuda()\n"}  # fmt: skip
ONLY_ALONE = ("model = ", "in loader:")  # what the libraries do by themselves
WARM = 0.2  # of the steps, before which the rate is not counted
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Contender:
    """One way to do a task."""

    task: str
    name: str
    file: str  # in the task's folder
    needs: tuple[str, ...] = ()  # packages

    @property
    def path(self) -> Path:
        """The file that a user writes."""
        return TASKS / self.task / self.file

    @property
    def lines(self) -> int:
        """The lines of it that are neither empty nor a comment."""
        lines = (line.strip() for line in self.path.read_text("utf-8").splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def words(self, on_gpu: Path | None) -> list[str]:
        """The command, as `timed.py` takes it; for a GPU with a copy of the task's files in that folder."""
        path = self.path
        if on_gpu is not None and path.suffix == ".py":
            path = shutil.copytree(path.parent, on_gpu / self.task, dirs_exist_ok=True) / self.file
            path.write_text(self.for_gpu())
        return ["-m", "paceline", "train", str(path)] if path.suffix == ".toml" else [str(path)]

    def for_gpu(self) -> str:
        """Return the script as it is on a GPU."""
        text = self.path.read_text("utf-8")
        for word, other in ON_GPU.items():
            if self.name == "torch alone" or not word.startswith(ONLY_ALONE):
                text = text.replace(word, other)
        return text


CONTENDERS = (
    Contender("finetune", "Paceline", "paceline.toml"),
    Contender("finetune", "HF Trainer", "trainer.py", ("accelerate",)),
    Contender("finetune", "Accelerate", "with_accelerate.py", ("accelerate",)),
    Contender("finetune", "Fabric", "with_fabric.py", ("lightning",)),
    Contender("lora", "Paceline", "paceline.toml"),
    Contender("lora", "HF Trainer + peft", "trainer.py", ("accelerate", "peft")),
    Contender("classify", "Paceline", "paceline.toml"),
    Contender("classify", "HF Trainer", "trainer.py", ("accelerate",)),
    Contender("images", "Paceline", "paceline.toml"),
    Contender("images", "HF Trainer", "trainer.py", ("accelerate",)),
    Contender("loop", "torch alone", "plain.py"),
    Contender("loop", "Paceline", "with_paceline.py"),
    Contender("loop", "Accelerate", "with_accelerate.py", ("accelerate",)),
    Contender("loop", "Fabric", "with_fabric.py", ("lightning",)),
)
NAMES = tuple(dict.fromkeys(each.task for each in CONTENDERS))


@dataclass(frozen=True)
class Told:
    """What one run of a contender showed."""

    first_step: float  # seconds since its process began
    steps_per_second: float
    peak_bytes: float
    metric: float
    steps: int


def run(contender: Contender, folder: Path, out: Path, on_gpu: bool) -> Told:
    """Run a contender in a folder with the tasks' data. Raises RuntimeError with what it said where it fails."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
               "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    words = [sys.executable, str(TIMED), str(out), *contender.words(folder / "on-gpu" if on_gpu else None)]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{contender.task}, {contender.name}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    noted = json.loads(out.read_text())
    moments = noted["steps"]
    begin = int(len(moments) * WARM)
    rate = (len(moments) - 1 - begin) / (moments[-1] - moments[begin])
    return Told(moments[0], rate, noted["peak_bytes"], _metric(contender, folder, done.stdout), len(moments))


def _metric(contender: Contender, folder: Path, printed: str) -> float:
    if contender.path.suffix != ".toml":
        return float(re.findall(r"^metric (\S+)", printed, re.M)[-1])
    (run_dir,) = (folder / "runs").iterdir()
    last: Any = [record for record in read_records(run_dir) if record.KIND == "evaluation"][-1]
    return float((last.metrics or {}).get("accuracy", last.loss))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table."""
    lines = [
        "| task | with | lines | first step, s | steps/s | peak memory, MB | metric |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = (f"{row['first_step']:.1f}", f"{row['steps_per_second']:.2f}", f"{row['peak_bytes'] / 1e6:,.0f}",
                 f"{row['metric']:.3f}")  # fmt: skip
        lines.append(f"| {row['task']} | {row['name']} | {row['lines']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def document(result: dict[str, Any], arguments: list[str]) -> list[str]:
    """Return the Markdown page of a result, in lines."""
    rows, left, rounds, facts = (result[name] for name in ("rows", "left_out", "rounds", "machine"))
    on_gpu = result.get("device", "cpu") == "cuda"
    gpu = f"{facts['gpu']} · " if on_gpu else ""
    where = f"{facts['date']} · {gpu}{facts['cpu']}, one of {facts['cores']} cores · torch {facts['torch']}"
    precision = [
        "All compute in fp32, as the others' guides write it and as Paceline plans on a machine that was not measured:",
        "for runs of less than a minute `train` does not measure it.",
    ]
    if on_gpu:
        precision = [
            "The others compute in fp32, as their guides write it. Paceline's planner takes bf16 on a GPU where the",
            "spec says nothing; on the loop of one's own too. Memory is the host's.",
        ]
    return [
        "# The first hour, side by side",
        "",
        f"`python benchmarks/first_hour.py {' '.join(arguments)}`",
        "",
        f"{where} · one process on one core · {rounds} rounds",
        "",
        table(rows),
        "",
        "Lines are those of the file that a user writes. The metric is the held-out loss (finetune, lora), the",
        "accuracy (classify, images), or the loss of the last 20 steps (loop). All hold out the same documents, rows",
        "and images, and none warms its rate up; rows come in an order of each library's own, and the decay of weights",
        "and of second moments is each one's default, so metrics are equal within noise and not to the digit.",
        *precision,
        *([""] if left else []),
        *left,
        "",
    ]


def compete(names: list[str], rounds: int, folder: Path, on_gpu: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for every contender that could run, and why others could not."""
    subprocess.run([sys.executable, str(TASKS / "make_folders.py"), str(folder)], check=True)
    compileall.compile_dir(Path(paceline.__file__).parent, quiet=1)  # as pip does, which has installed the others
    told: dict[Contender, list[Told]] = {}
    chosen = [each for each in CONTENDERS if each.task in names]
    left = [f"{each.task} with {each.name}: {', '.join(each.missing)} not installed" for each in chosen if each.missing]
    for number in range(rounds):
        for contender in chosen if number % 2 == 0 else reversed(chosen):
            if not contender.missing:
                found = run(contender, folder, folder / "noted.json", on_gpu)
                told.setdefault(contender, []).append(found)
                print(f"{contender.task:9} {contender.name:18} {found}", file=sys.stderr, flush=True)
    fields = ("first_step", "steps_per_second", "peak_bytes", "metric", "steps")
    rows = [
        {"task": each.task, "name": each.name, "lines": each.lines}
        | {field: statistics.median(getattr(one, field) for one in told[each]) for field in fields}
        for each in chosen
        if each in told
    ]
    return rows, left


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return results of different tasks, measured one after the other, as one. Raises ValueError for unlike ones."""
    first = results[0]
    if any((each["machine"], each["rounds"]) != (first["machine"], first["rounds"]) for each in results):
        raise ValueError("only results of one machine and day, of as many rounds, belong on one page")
    rows = sorted((row for each in results for row in each["rows"]), key=lambda row: NAMES.index(row["task"]))
    return {**first, "rows": rows, "left_out": [line for each in results for line in each["left_out"]]}


def main(arguments: list[str]) -> int:
    """Measure, print the table and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", metavar="OUT", help="also write the result as JSON")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/first_hour.md, or first_hour_gpu.md, and figures"
    )
    parser.add_argument("--join", nargs="+", metavar="JSON", help="measure nothing; put these results together")
    parser.add_argument("--note", default="", metavar="TEXT", help="with --join: how the machine was meanwhile")
    options = parser.parse_args(arguments)
    names = options.tasks.split(",")
    if unknown := set(names) - set(NAMES):
        parser.error(f"--tasks: unknown {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    rounds = 1 if options.quick else options.rounds
    if options.join:
        result = joined([json.loads(Path(path).read_text("utf-8")) for path in options.join])
        result["left_out"] += [options.note] if options.note else []
        arguments = ["--tasks", "TASK", "--rounds", str(result["rounds"]), "--json", "OUT"]
    else:
        with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
            rows, left = compete(names, rounds, Path(name), options.device == "cuda")
        result = {"machine": machine(), "device": options.device, "rounds": rounds, "rows": rows, "left_out": left}
    lines = document(result, arguments)
    print("\n".join(lines[6:]))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    if options.save:
        keep("first_hour" if result.get("device", "cpu") == "cpu" else "first_hour_gpu", result, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
