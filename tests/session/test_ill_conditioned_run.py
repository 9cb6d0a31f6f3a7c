"""A right program that fp32 cannot tell from a wrong one, from the command line to the journal and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import as_json, environment, paceline, write_spec

from paceline.spec.journal.reading import read_journal

MODEL = """
import torch
from torch import nn


class Waves(nn.Module):
    \"\"\"Sines whose phases are 1e5 radians after a step: the last place of fp32 turns them by a hundredth.\"\"\"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(600, 8)
        self.phase = nn.Linear(8, 16)
        self.head = nn.Linear(16, 600)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.phase.weight.mul_(1e5)

    def forward(self, tokens):
        return self.head(torch.sin(self.phase(self.embed(tokens))))
"""
SAYS = (
    "ill-conditioned, equal to one device in fp64: loss ",
    "; in fp32 ",
    "where rounding weights to fp32 moves one device by",
    "the plan is right",
    "a smaller learning rate",
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waves")
    (folder / "waves_model.py").write_text(MODEL)
    path = write_spec(folder, folder / "run", 2, "dp_replicate = 2", steps=3)
    own = {"model": 'model = "waves_model:Waves"\nobjective = "next_token"',
           "optimizer": 'optimizer = { name = "sgd", lr = 3e-3 }', "verify": ""}  # fmt: skip
    lines = path.read_text().splitlines()
    path.write_text("\n".join(own.get(line.partition(" =")[0], line) for line in lines))
    return path


def check_rounding(rounding: dict[str, Any]) -> None:
    """Assert what the record says: off by more than fp32 allows, by no more than one device moves, equal in fp64."""
    assert rounding["dtype"] == rounding["format"] == "fp32" and rounding["coarse"] and rounding["where"] == ""
    assert rounding["relative"] > rounding["tolerance"]
    assert rounding["relative"] <= 6 * rounding["moved"] or rounding["chaos"] is not None
    assert rounding["quantity"] in ("loss", "gradients", "grad_norm", "weights") and rounding["step"] == 2
    assert max(rounding["fp64"][name] for name in ("loss", "gradients", "grad_norm", "weights")) < 1e-6


@pytest.mark.deep
def test_verify_says_that_fp32_cannot_tell(spec: Path) -> None:
    done = paceline("verify", spec, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in SAYS), done.stdout
    done = paceline("verify", spec, "--steps", "2", "--json")
    (proof,) = as_json(done.stdout)["layouts"]
    assert done.returncode == 0 and proof["equal"] and proof["first_difference"] is None
    assert proof["verdict"] == "ill-conditioned"
    check_rounding(proof["ill_conditioned"])


def test_train_says_so_and_trains_and_the_journal_and_the_report_keep_it(spec: Path) -> None:
    run_dir, at_home = spec.parent / "run", environment(XDG_CACHE_HOME=str(spec.parent / "home"))
    done = paceline("train", spec, env=at_home)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in SAYS), done.stdout
    (record,) = [record for record in read_journal(run_dir) if record["kind"] == "verify"]
    assert record["equal"] is True and record["verdict"] == "ill-conditioned" and record["cached"] is False
    assert all(words in record["text"] for words in SAYS)
    check_rounding(record["ill_conditioned"])
    told = paceline("report", run_dir)
    assert told.returncode == 0 and "ill-conditioned, equal to one device in fp64" in told.stdout
    page = (run_dir / "report.html").read_text()
    assert "ill-conditioned</span>" in page and record["ill_conditioned"]["name"] in page
    assert "a smaller learning rate" in page

    again = paceline("train", spec, "--set", f"run.dir={spec.parent / 'again'}", env=at_home)
    assert again.returncode == 0 and "(proved " in again.stdout and "ill-conditioned" in again.stdout
    (record,) = [record for record in read_journal(spec.parent / "again") if record["kind"] == "verify"]
    assert record["cached"] is True and record["verdict"] == "ill-conditioned"
    check_rounding(record["ill_conditioned"])
