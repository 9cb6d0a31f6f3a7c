"""Runs `paceline verify` for many planted mistakes, with one group of processes for the proofs of all of them.

Each mistake has a command of its own: its words are parsed, its spec read, its layout planned and its twins made, and
its result printed and turned into an exit code. In between, all commands wait until the jobs of all have run together:
a command is run once to see what it asks for, and once more with the answers. Of its jobs as many run as are needed
for the first that is not equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from catalogue import BY_NAME, CASES, name_of
from planted import Planted
from runs import write_corpus

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.session.verbs import proofs
from paceline.verify.process import start
from paceline.verify.process.group import Job, Result, run_jobs

HERE = Path(__file__).parent
PLACES = [str(HERE / "plants"), str(HERE), str(HERE.parent / "helpers"), str(HERE.parent)]  # of what ranks import
STEPS = 2
SPEC = """
[task]
name = "planted"
model = {{ {model} }}
data = {{ source = "{corpus}", seq_len = 16, validation_fraction = 0.2, cache_dir = "{cache}"{data} }}
optimizer = {{ lr = 1e-2, {eps}clip_norm = 0.5{optimizer} }}
schedule = {{ kind = "constant" }}
global_batch = "14 samples"
stop = "20 steps"
{task}
{tables}
[cluster]
device = "cpu"
probe = false

[plan]
precision = "fp32"
{plan}
"""


@dataclass(frozen=True)
class Proven:
    """What a command said: its exit code, and the record of its layout."""

    code: int
    record: dict[str, Any]


class _Asked(BaseException):
    """A command has come to its jobs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)


def words_of(bug: Planted, folder: Path) -> list[str]:
    """Return the command that proves the case of a mistake with the mistake planted."""
    return [
        "verify", str(_spec_of(bug, folder)), "--layout", CASES[bug.case].layout, "--dtype", "fp64",
        "--steps", str(STEPS), "--json", "--set", f"task.objective=planted_objective:{name_of(bug)}",
    ]  # fmt: skip


def training_words_of(bug: Planted, folder: Path) -> list[str]:
    """Return the command that trains the case of a mistake with the mistake planted."""
    layout = CASES[bug.case].layout.split(",")
    degrees = {axis: int(n) for axis, n in (part.split("=") for part in layout) if n.isdigit() and axis != "zero"}
    ranks = math.prod(n for axis, n in degrees.items() if axis != "ep")  # those of `ep` are among `dp_shard`'s
    settings = [
        f"task.objective=planted_objective:{name_of(bug)}", f"cluster.devices={ranks}", "run.verify=true",
        f"run.dir={folder / 'trained' / name_of(bug)}", *(f"plan.{part}" for part in layout),
    ]  # fmt: skip
    return ["train", str(_spec_of(bug, folder)), *(word for each in settings for word in ("--set", each))]


def _spec_of(bug: Planted, folder: Path) -> Path:
    case = CASES[bug.case]
    spec = folder / f"{bug.case.replace(', ', '-').replace(' ', '-')}.toml"
    if not spec.exists():
        more = {name: f", {text}" if (text := getattr(case, name)) else "" for name in ("data", "optimizer")}
        more |= {"task": case.task, "tables": case.tables, "plan": case.plan, "model": case.model, "eps": case.eps}
        spec.write_text(SPEC.format(corpus=write_corpus(folder), cache=folder / "cache", **more))
    return spec


def prove_all(bugs: Sequence[Planted], folder: Path) -> dict[str, Proven]:
    """Return what the command of every mistake said, by what is planted."""
    commands = {bug.what: words_of(bug, folder) for bug in bugs}
    with _ranks_find_us(), pytest.MonkeyPatch.context() as patch:
        traced = start.profile_task  # by the case: what is planted in ranks changes no profile
        known = functools.cache(lambda case: traced(*asked[case]))
        asked: dict[str, Any] = {}

        def profile(task: Any, facts: Any) -> Any:
            named = CASES[BY_NAME[task.objective.partition(":")[2]].case].objective  # which it is, outside of ranks
            task = dataclasses.replace(task, objective=f"planted_models:{named}" if named else "next_token")
            case = repr((task.model, task.objective, task.data, task.adapter))
            asked.setdefault(case, (task, facts))
            return known(case)

        patch.setattr(start, "profile_task", profile)
        patch.setattr(proofs, "proof_ahead", contextlib.nullcontext)  # a process for each command, which ends at once
        jobs = {what: _jobs(words, patch) for what, words in commands.items()}
        results = _run(jobs)
        return {what: _answer(words, results[what], patch) for what, words in commands.items()}


def _jobs(words: list[str], patch: pytest.MonkeyPatch) -> list[Job]:
    """Return what a command would run."""

    def ask(jobs: Sequence[Job], *_: object, **__: object) -> list[Result]:
        raise _Asked(jobs)

    patch.setattr(start, "run_jobs", ask)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = main(words)
    except _Asked as asked:
        return asked.jobs
    raise AssertionError(f"{' '.join(words)} ended with {code} before its proof: {said.getvalue()}")


def _run(jobs: dict[str, list[Job]]) -> dict[str, list[Result]]:
    """Return the results of every command's jobs up to the first that is not equal, in rounds of one job for each."""
    results: dict[str, list[Result]] = {what: [] for what in jobs}
    going = list(jobs)
    while going:
        found = run_jobs([jobs[what][len(results[what])] for what in going], STEPS)
        for what, result in zip(going, found, strict=True):
            results[what].append(result)
        going = [what for what in going if _goes_on(results[what][-1]) and len(results[what]) < len(jobs[what])]
    return results


def _goes_on(result: Result) -> bool:
    return not isinstance(result, PacelineError) and result.equal


def _answer(words: list[str], results: list[Result], patch: pytest.MonkeyPatch) -> Proven:
    """Return what a command says of these results."""
    patch.setattr(start, "run_jobs", lambda jobs, *_, **__: results)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    told = json.loads(said.getvalue() or "{}")
    return Proven(code, told["layouts"][0] if "layouts" in told else {"error": errors.getvalue() or said.getvalue()})


@contextlib.contextmanager
def _ranks_find_us() -> Iterator[None]:
    """Have the ranks of proofs find the modules of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path_of_ranks())
        patch.syspath_prepend(str(HERE))
        yield


def path_of_ranks() -> str:
    """Return PYTHONPATH for a process whose ranks find the modules of this folder."""
    return os.pathsep.join(filter(None, [*PLACES, os.environ.get("PYTHONPATH", "")]))
