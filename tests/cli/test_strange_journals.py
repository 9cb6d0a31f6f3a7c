"""Lines of a journal that are no records, or not what they say they are: every command that reads a run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runs import in_process, write_spec

STRANGE = ("[]", "7", "null", '"x"', "{}", '{"kind": []}', '{"kind": {"a": 1}}', '{"kind": "ste', "\u00e9\u2028",
           '{"kind": "step", "step": "x", "loss": []}', '{"kind": "step", "step": 3, "time": "x", "attempt": "y"}',
           '{"kind": "evaluation", "step": 2, "loss": "low", "metrics": []}', '{"kind": "run_started"}',
           '{"kind": "run_ended"}', '{"kind": "verify"}', '{"kind": "fault", "what": 3}', '{"kind": "checkpoint"}',
           '{"kind": "decision", "what": ["plan"]}')  # fmt: skip
VERBS = (("report",), ("report", "--json"), ("bill",), ("logs",), ("checkpoint", "ls"), ("compare",))
CODES = (0, 2, 5, 74)  # done, or in words: nothing to show, data or storage that cannot be read


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange")
    done = in_process("train", write_spec(folder, folder / "run", steps=4))
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("place", ["first", "last", "between"])
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_command_that_reads_a_run_goes_on(finished: Path, tmp_path: Path, verb: tuple[str, ...], place: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    journal = run / "journal" / "0001.jsonl"
    lines = journal.read_text().splitlines()
    at = {"first": 0, "last": len(lines), "between": len(lines) // 2}[place]
    journal.write_text("\n".join([*lines[:at], *STRANGE, *lines[at:]]) + "\n")
    given = [run, finished] if verb == ("compare",) else [run]
    done = in_process(*verb, *given)
    assert done.returncode in CODES, done.stderr
    assert "Traceback" not in done.stderr + done.stdout and "defect" not in done.stderr


def test_a_run_goes_on_behind_such_lines(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    spec = write_spec(tmp_path, folder, steps=6)
    assert in_process("train", spec, "--steps", "4").returncode == 0
    journal = folder / "journal" / "0001.jsonl"
    journal.write_text(journal.read_text() + "\n".join(STRANGE) + "\n")
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    assert "resume   step 4" in done.stdout
