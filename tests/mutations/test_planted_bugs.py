"""Every planted mistake is caught, named and diagnosed by `paceline verify`; without one, nothing is flagged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from catalogue import CONTROLS, PROOFS, name_of
from commands import Proven, path_of_ranks, prove_all, training_words_of, words_of
from distributed import run_ranks
from planted import Planted
from planted_lines import checks_of
from resumed import PLANS as RESUME_PLANS
from resumed import RESUMES, Lost, resume_all
from runs import as_json, environment, paceline
from write_table import PAGE, row_of

from paceline.errors import ConfigError, StorageError, VerificationFailed

# Every run of the tests has these, and the first of each quantity that none of these shows; `make test-deep` has
# all. Of what only the last parts of a proof show, which take long to come to, it has these alone.
ALWAYS = (
    "keys and values are swapped when they are passed on", "the ring's second step loses its gradients",
    "a middle stage forgets the gradients of its first micro-batch", "eps is the same for every task",
    "outputs are summed over the first two tensor ranks", "the third micro-batch has no gradient",
    "the fourth bucket of gradients is never reduced", "the second chunk of logits is left out of the loss",
    "the learning rate is one step late after a resume", "experts are saved under the wrong rank",
    "rank 1 trains on rank 0's rows", "every rank evaluates the same part of the held-out samples",
    "bf16: shards reduce-scatter their gradients in bf16", "fp16: one rank alone sees that gradients overflow",
    "bf16: copies keep the casts of their first weights",
)  # fmt: skip
# Without a mistake every part of a proof runs, the story too. Of these, `make test` has others that are like them:
# test_compare.py, test_low.py and test_no_false_alarm.py in tests/verify/ prove such layouts equal, and what the pages
# of docs/ and test_verify_verb.py run are whole proofs of them.
LONG_CONTROLS = (
    "copies", "zero 3",
    "tied", "state on the host", "dropout", "stages, dropout", "experts", "experts, stages, bias", "zero 3, bf16",
    "experts, bf16", "metrics, tensor", "growing by noise", "LoRA with dropout, tensor", "selection", "largest losses",
    "four stages", "tensor ranks of four", "ring of four", "experts, tensor, bf16", "packed rows, shared sequences",
    "four bits, shards", "gathered rows of four", "statistics of all of four",
    "statistics beside tables", "experts, slots", "split biases, tensor", "gathered, tensor", "stages that count",
)  # fmt: skip
# Words that name one cause and nothing beside it -> the mistakes that are this cause.
CAUSES = {
    "bf16 rounding": ("copies sum their gradients in bf16", "shards reduce-scatter their gradients in bf16"),
    "weight decay on": ("weight decay is applied to norms",),
    "a padding mask is lost": (
        "masked labels count as class 0",
        "a stand-in row of a rank without any counts",
        "what fills up a sequence has labels",
    ),
    "several ranks read the same samples": (
        "all ranks read the same rows",
        "rank 1 trains on rank 0's rows",
        "ranks of unequal shares begin where those of equal ones would",
        "the last stage reads the rows of other copies",
    ),
    "clip by different norms": ("each rank clips by the norm of its own shard", "each stage clips by its own norm"),
    "drawn from a seed of their own": ("every rank draws weights of its own",),
    "copies drift apart": ("one copy does not make the update",),
    "rows dropped": (
        "the last row of an uneven batch is dropped",
        "the last rows of micro-batches of two sizes are left out",
    ),
}


REFUSED = (
    ConfigError.exit_code,
    StorageError.exit_code,
    VerificationFailed.exit_code,
)  # a run that ends before a number is compared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


class Proofs:
    """What the commands say; those of all tests that were selected are made as soon as one of them is wanted."""

    def __init__(self, folder: Path, selected: list[Planted]) -> None:
        self._folder, self._selected, self._made = folder, selected, dict[str, Proven]()

    def __getitem__(self, bug: Planted) -> Proven:
        if bug.what not in self._made:
            left = {other.what: other for other in (bug, *self._selected) if other.what not in self._made}
            self._made |= prove_all(list(left.values()), self._folder)
        return self._made[bug.what]


def is_long(bug: Planted) -> bool:
    """Return whether a command is one of many: with others that end alike, or in the last parts of a proof."""
    if bug.what in ALWAYS or bug in CONTROLS:
        return bug in CONTROLS and bug.case in LONG_CONTROLS
    alike = [other.what for other in PROOFS if other.quantity == bug.quantity]
    return bool(bug.part) or bug.what != alike[0] or any(what in ALWAYS for what in alike)


def params(bugs: list[Planted]) -> list[Any]:
    marks = {True: (pytest.mark.deep,), False: ()}
    return [pytest.param(bug, id=bug.what, marks=marks[is_long(bug)]) for bug in bugs]


@pytest.fixture(scope="module")
def proven(folder: Path, request: pytest.FixtureRequest) -> Proofs:
    given = [value for item in request.session.items if (call := getattr(item, "callspec", None)) is not None
             for value in call.params.values()]  # fmt: skip
    return Proofs(folder, [value for value in given if isinstance(value, Planted)])


@pytest.fixture(scope="module")
def resumes() -> tuple[dict[str, Any], dict[str, Any]]:
    return run_ranks(resume_all, 2)[0]


@pytest.mark.parametrize("bug", params(PROOFS))
def test_the_proof_catches_it_and_names_it(bug: Planted, proven: Proofs) -> None:
    command = proven[bug]
    if bug.quantity == "error":
        assert command.code in REFUSED and bug.says in command.record["error"], command
        return
    assert command.code == 4, command
    first = command.record["first_difference"]
    assert (first["quantity"], first["family"]) == (bug.quantity, bug.diagnosed), first
    assert bug.tensor in first["name"] and first["name"] in first["tensors"]
    assert bug.says in first["likely"]
    assert first["part"] == (bug.part or first["part"]), "a part before it sees it already"
    assert first["step"] == (bug.step or first["step"])


@pytest.mark.parametrize("bug", params([bug for bug in PROOFS if bug.quantity != "error"]))
def test_a_cause_that_is_named_is_the_planted_one(bug: Planted, proven: Proofs) -> None:
    likely = proven[bug].record["first_difference"]["likely"]
    for words, planted in CAUSES.items():
        assert words not in likely or bug.what in planted, likely


@pytest.mark.parametrize("control", params(CONTROLS))
def test_controls_are_not_flagged(control: Planted, proven: Proofs) -> None:
    command = proven[control]
    assert command.code == 0 and command.record["first_difference"] is None, command


def test_a_command_in_a_process_of_its_own_says_the_same(folder: Path, proven: Proofs) -> None:
    bug = next(bug for bug in PROOFS if bug.what == "the fourth bucket of gradients is never reduced")
    done = paceline(*words_of(bug, folder), env=environment(PYTHONPATH=path_of_ranks()))
    assert done.returncode == 4, done.stderr
    (record,) = as_json(done.stdout)["layouts"]
    expected = proven[bug].record["first_difference"]
    assert {**record["first_difference"], "relative": 0} == {**expected, "relative": 0}


@pytest.mark.parametrize("what", [
    "bf16: shards reduce-scatter their gradients in bf16",
    *(pytest.param(what, marks=pytest.mark.deep) for what in (
        "bf16: ZeRO-1 reduce-scatters its gradients in bf16", "bf16: weights are kept in bf16",
        "bf16: rows travel to their experts in fp32",
        "bf16: ranks that share a sequence sum its load in bf16", "bf16: the scores of experts are rounded",
        "fp16: one rank alone sees that gradients overflow", "fp16: after a skip losses keep the scale from before",
        "bf16: copies keep the casts of their first weights", "bf16: copies evaluate in fp32",
        "bf16: tensor ranks with experts keep the casts of their first weights",
    )),
])  # fmt: skip
def test_training_does_not_start_in_the_wrong_format(what: str, folder: Path) -> None:
    bug = next(bug for bug in PROOFS if bug.what == what)
    done = paceline(*training_words_of(bug, folder), env=environment(PYTHONPATH=path_of_ranks()))
    assert done.returncode == 4, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "low precision" in said and bug.tensor in said
    assert not list((folder / "trained" / name_of(bug)).glob("checkpoints/*"))


@pytest.mark.parametrize("lost", RESUMES, ids=lambda lost: lost.what)
def test_a_resumed_run_catches_it_and_names_it(lost: Lost, resumes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert resumes[0][lost.what] == (lost.quantity, lost.step)


@pytest.mark.parametrize("case", RESUME_PLANS)
def test_resumed_runs_without_a_mistake_do_not_depart(
    case: str, resumes: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    assert resumes[1][case] is None


def test_every_mistake_has_a_name_of_its_own() -> None:
    names = [bug.what for bug in (*PROOFS, *CONTROLS, *RESUMES)]
    assert len(set(names)) == len(names)


def test_the_lines_that_mistakes_change_are_there() -> None:
    checks = [check for bug in PROOFS for check in checks_of(bug.plant)]
    assert len(checks) > 90
    stale = []
    for check in checks:
        try:
            check()
        except (AssertionError, AttributeError, ImportError, ValueError) as error:
            stale.append(f"{type(error).__name__}: {error}")
    assert not stale


def test_the_page_lists_every_mistake() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| family", "|---"))]
    rows = rows[: next((at for at, row in enumerate(rows) if row.startswith("| mistake")), len(rows))]
    expected = [row_of(bug) for bug in (*PROOFS, *RESUMES)]
    again = "run tests/mutations/write_table.py again"
    assert len(rows) == len(expected), again
    assert all(row.startswith(start) for row, start in zip(rows, expected, strict=True)), again
    assert "not caught" not in "".join(rows) and "not run" not in "".join(rows), again
