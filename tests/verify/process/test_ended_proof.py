"""A layout whose ranks end with an error of torch is told in words that say what it is, and not by the error alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from runs import write_corpus

from paceline.cli.main import main
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference
from paceline.supervise.pulses.pulse import STACK_SIGNAL, stack_path
from paceline.supervise.supervisor import Outcome
from paceline.verify.process import start, worker
from paceline.verify.process.group import Job, Result, _failure

SPEC = """
[task]
name = "ends"
model = {{ name = "llama-1m" }}
data = {{ source = "{corpus}", seq_len = 16, validation_fraction = 0.2, cache_dir = "{cache}" }}
objective = "{objective}"
global_batch = "8 samples"
stop = "4 steps"

[cluster]
device = "cpu"
probe = false
"""
RAW = {
    "what": "RuntimeError: The size of tensor a (8) must match the size of tensor b (16)", "because": "", "try": "",
    "rank": 1, "traceback": "Traceback (most recent call last):\n  File moe.py",
}  # fmt: skip
SAID = {"what": "the rows do not fit", "because": "they are eight", "try": "sixteen", "rank": 1}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    spec = tmp_path / "ends.toml"
    corpus = write_corpus(tmp_path)
    spec.write_text(SPEC.format(corpus=corpus, cache=tmp_path / "cache", objective="next_token"))
    return ["verify", str(spec), "--layout", "tp=2", "--dtype", "fp64"]


def ends_with(
    patch: pytest.MonkeyPatch, error: dict[str, object], after: int, dtype: str = "fp64", code: int = 1
) -> list[Job]:
    """Have the part after so many equal ones end with an error; return the jobs, as soon as they are known."""
    asked: list[Job] = []

    def run(jobs: Sequence[Job], *_: object, **__: object) -> Iterator[Result]:
        asked.extend(jobs)
        yield from [CheckProof(True, dtype, 1, 0.1, {}, None)] * after
        yield _failure(Outcome(code, error=error))

    patch.setattr(start, "run_jobs", run)
    return asked


def test_an_error_of_torch_is_told_as_one_of_the_layout(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ends_with(monkeypatch, RAW, 1)
    assert main(command) == 4
    told = capsys.readouterr().err
    assert "layout tp=2 ends with an error in its proof" in told and jobs[1].part in told
    assert "because  RuntimeError: The size of tensor a (8)" in told and "one device computes loss" in told
    assert "try      a layout without one of its axes" in told
    assert "rank 1:\nTraceback (most recent call last)" in told


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGABRT, 4), (signal.SIGSEGV, 4), (signal.SIGKILL, 137)])
def test_a_rank_whose_native_code_crashes_is_told_as_one_of_the_layout(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, expected: int
) -> None:
    """gloo aborts where collectives do not fit: that was code 134, and "start the same command again: it resumes"."""
    died = {"what": f"rank 0 of 2 was ended by {signal.Signals(number).name}", "because": "", "try": "", "rank": 0}
    ends_with(monkeypatch, died, 1, code=128 + number)
    assert main(command) == expected
    told = capsys.readouterr().err
    assert ("layout tp=2 ends with an error in its proof" in told) is (expected == 4), "who kills is another"
    assert died["what"] in told and "it resumes" not in told


@pytest.mark.parametrize("after", [0, 1], ids=["alone", "in the layout"])
def test_a_penalty_on_gradients_that_torch_cannot_differentiate_is_told_with_a_way_out(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    """The layout was blamed for it."""
    kernel = "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
    ends_with(monkeypatch, {**RAW, "what": f"RuntimeError: {kernel}"}, after)
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "cannot differentiate twice" in told and kernel in told and "sdpa_kernel(SDPBackend.MATH)" in told
    assert "ends with an error in its proof" not in told


@pytest.mark.parametrize("after", [0, 1], ids=["alone", "in the layout"])
def test_flex_attention_is_told_as_what_no_cpu_trains(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    """An error of the layout, or a traceback, for a program that trains on GPUs."""
    kernel = "NotImplementedError: FlexAttention does not support backward on CPU. Please set requires_grad to False"
    ends_with(monkeypatch, {**RAW, "what": kernel}, after)
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "flex_attention has a backward pass on GPUs alone" in told and "scaled_dot_product" in told
    assert "ends with an error in its proof" not in told


def test_what_one_device_runs_into_is_no_fault_of_the_layout(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = ends_with(monkeypatch, RAW, 0)
    assert main(command) == 1
    told = capsys.readouterr().err
    assert jobs[0].plan.layout.devices == 1 and "ends with an error" not in told and "RuntimeError" in told


def test_a_program_that_knows_no_fp64_is_no_fault_of_the_layout(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(monkeypatch, RAW, 1, "fp32")
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "the program knows no fp64" in told and "ends with an error" not in told and "--dtype fp32" in told


def test_an_error_that_says_what_to_do_stays_as_it_is(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(monkeypatch, SAID, 1)
    assert main(command) == 1
    assert capsys.readouterr().err.count("the rows do not fit\n  because  they are eight\n  try      sixteen") == 1


def test_parts_after_one_that_failed_are_left_out_and_those_before_it_are_not(tmp_path: Path) -> None:
    """All parts of a proof ran into the same error one after the other: 50 s for a task of damaged samples."""
    rows = [worker.Row(tmp_path, Plan(), "steps", False, 1, number) for number in (3, 0, 2, 1)]
    told = tmp_path / "result.jsonl"
    told.touch()
    assert worker._still_asked(rows, [1, 2, 3], told) == [1, 2, 3]
    needs = {"exit_code": 2, "error": {"error": "NeedsWholeWeights", "what": "it is told again on copies"}}
    worker._tell(told, 3, failed=needs)
    assert worker._still_asked(rows, [1, 2], told) == [1, 2]
    died = {"exit_code": 137, "error": None}
    worker._tell(told, 2, failed=died)
    assert worker._still_asked(rows, [0, 1], told) == [1], "the part before it may say more"
    assert worker._lines(told)[-1] == {"job": 0, "failed": died}


def test_parts_after_one_that_is_not_equal_are_left_out_too(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [worker.Row(tmp_path, Plan(), "steps", False, 1, number) for number in (3, 0, 2, 1)]
    told = tmp_path / "result.jsonl"
    told.touch()
    worker._tell(told, 1, result={"equal": True})
    assert worker._still_asked(rows, [0, 2, 3], told) == [0, 2, 3]
    worker._tell(told, 2, result={"equal": False})
    assert worker._still_asked(rows, [0, 3], told) == [3]
    assert worker._lines(told)[-1] == {"job": 0, "result": {"equal": False}}

    def run(jobs: Sequence[Job], *_: object, **__: object) -> Iterator[Result]:
        numbers = {"relative": 1.0, "ratio": 2.0, "ours": 2.0, "reference": 1.0}
        first = FirstDifference("loss", "loss", 1, 0, **numbers, copies_agree=True, tensors=("loss",),
                                tensors_in_all=1, family="forward pass", likely="a word")  # fmt: skip
        yield CheckProof(False, "fp64", 1, 0.1, {"loss": 1.0}, first)
        raise AssertionError("nobody reads the parts after it")

    monkeypatch.setattr(start, "run_jobs", run)
    assert main(command) == 4
    assert "likely cause (forward pass): a word" in " ".join(capsys.readouterr().err.split())


def test_ranks_of_a_proof_answer_with_their_stacks_and_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for each other for ever is found so (tests/supervise/pulses/test_standstill.py), in seconds."""
    seen: list[object] = []

    def supervised(start: Callable[..., object], ranks: int, environ: object, answer: bool) -> Outcome:
        seen.append((ranks, answer))
        start({})
        return Outcome(0)

    def compared(*_: object) -> None:
        os.kill(os.getpid(), STACK_SIGNAL)  # whoever does not expect it ends of it
        seen.append("in compared" in stack_path(tmp_path, 1).read_text())

    monkeypatch.setenv("PACELINE_ERRORS", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(worker, "supervise_started", supervised)
    monkeypatch.setattr(worker, "fork", lambda work, environ: work())
    monkeypatch.setattr(worker, "guarded", lambda work: work())  # it has signals end this process as a rank's
    monkeypatch.setattr(worker, "_compare_all", compared)
    row = worker.Row(tmp_path, Plan(Layout(dp_shard=2), batch_samples=8, micro_batch=4), "steps", False, 1)
    assert worker._in_forks({0: row}, worker.ReadOnce(), tmp_path / "results", True) == Outcome(0)
    assert seen == [(2, True), True]


WAITS = """
import torch
import torch.distributed as dist
from torch import nn


class Pulls(nn.Module):
    '''A model whose first rank asks the second for a number that nobody sends, where its weights are in shards.'''

    def __init__(self, **given):
        super().__init__()
        self.table, self.head = nn.Embedding(600, 8), nn.Linear(8, 600)

    def forward(self, tokens):
        if type(self) is not Pulls and dist.get_rank() == 0:
            pull()
        return self.head(self.table(tokens))


def pull():
    dist.recv(torch.zeros(1), src=1)
"""


@pytest.mark.deep
def test_a_proof_whose_ranks_wait_for_each_other_ends_with_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch would end it after ten minutes. A whole proof, and nothing of it is a stand-in."""
    (tmp_path / "of_a_user.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = tmp_path / "waits.toml"
    text = SPEC.format(corpus=write_corpus(tmp_path), cache=tmp_path / "cache", objective="next_token")
    spec.write_text(text.replace("llama-1m", "of_a_user:Pulls"))
    assert main(["verify", str(spec), "--layout", "dp_shard=2", "--dtype", "fp64"]) == 4
    told = " ".join(capsys.readouterr().err.split())
    assert "all 2 ranks wait for each other, and would for ever" in told
    assert "rank 0 in recv, called by pull (" in told and "of_a_user.py:" in told
