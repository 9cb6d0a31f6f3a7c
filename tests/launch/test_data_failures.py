"""Data that cannot be learned from end with exit code 5 and name the file and the place; nothing is trained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from runs import paceline, write_spec

from paceline.cli.main import main

GOOD = '{"text": "one and one is two, and two and two is four"}\n'


def broken(folder: Path, kind: str) -> Path:
    """Return the path of data that are broken in one way."""
    path = folder / kind.replace(" ", "-")
    if kind == "missing":
        return path
    if kind == "empty folder":
        path.mkdir()
        return path
    content = {
        "broken line": (GOOD * 6 + '{"text": "cut\n' + GOOD * 3).encode(),
        "wrong field": (GOOD * 4 + '{"body": "text"}\n').encode(),
        "not text": (GOOD * 2 + '{"text": 7}\n').encode(),
        "an array": (GOOD + "[1, 2]\n").encode(),
        "binary junk": random.Random(0).randbytes(4096),
        "empty file": b"",
        "too short": b'{"text": "x"}\n',
        "parquet junk": b"PAR1" + random.Random(0).randbytes(512),
        "gzip junk": b"\x1f\x8b" + random.Random(0).randbytes(512),
    }[kind]
    endings = {"binary junk": ".txt", "parquet junk": ".parquet", "gzip junk": ".txt.gz", "empty file": ".txt"}
    path = path.with_suffix(endings.get(kind, ".jsonl"))
    path.write_bytes(content)
    return path


CASES = [
    ("missing", "missing"), ("empty folder", "empty-folder"), ("broken line", "line 7"), ("wrong field", "line 5"),
    ("not text", "line 3"), ("an array", "line 2"), ("binary junk", "not UTF-8"), ("empty file", ""),
    ("too short", ""), ("parquet junk", "Parquet"), ("gzip junk", "unpacked"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "says"), CASES)
@pytest.mark.parametrize("verb", ["train", "plan"])
def test_broken_data(
    tmp_path: Path, verb: str, kind: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = write_spec(tmp_path, tmp_path / "run", 2)
    data = broken(tmp_path, kind)
    code = main([verb, str(spec), "--set", f"task.data.source={data}", "--set", "cluster.probe=false"])
    told = capsys.readouterr().err
    assert code == 5, told
    assert says in told and "\n  because  " in told and "\n  try      " in told and "Traceback" not in told
    assert not (tmp_path / "run" / "journal").exists()


def test_in_a_real_process(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, tmp_path / "run", 2)
    ended = paceline("train", spec, "--set", f"task.data.source={broken(tmp_path, 'broken line')}", "--json")
    assert ended.returncode == 5 and '"exit_code": 5' in ended.stdout
    assert "line 7" in ended.stderr and "Traceback" not in ended.stderr
