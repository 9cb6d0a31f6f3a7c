"""The proof before training, whoever trains: made, remembered from an earlier start, or left out on record."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.store import cache_dir, write_json
from paceline.errors import ConfigError, StorageError
from paceline.plan.planned import Planned
from paceline.run.process.handover import hand_over, holds_objects
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.session.ready.fingerprint import proof_key
from paceline.spec.arguments import run_directory
from paceline.spec.journal.kinds import DecisionRecord, RunEnded, VerifyRecord
from paceline.spec.journal.reading import read_kind
from paceline.spec.journal.record import own_fields, read
from paceline.supervise.standby import StartsApart
from paceline.verify.twin.proof_parts import ALONE, BRIEF, LOW, Subject, jobs_of

if TYPE_CHECKING:
    from paceline.verify.process.group import Job

STEPS = 2  # of the proof before training; `paceline verify` makes more, in more precisions
DTYPES = ("fp32",)  # beside the formats and decisions of a plan in bf16 or fp16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Proven:
    """What is known of a plan before it trains: the proof's record, and decisions about it, for the journal."""

    record: VerifyRecord | None = None
    decisions: tuple[DecisionRecord, ...] = ()


def prove(planned: Planned, say: Say = say_line, standby: StartsApart | None = None) -> Proven:
    """Prove the plan equal to one device, or take the proof that was made of the same before; say which.

    One device has nothing to prove, but that a batch which it cuts may be cut, and a run that is complete no more.
    `run.verify = false`, and a task that cannot be handed to other processes, are decisions. The proof's processes are
    forked from `standby`, where there is one. Raises VerificationFailed where the plan is not equal.
    """
    jobs = jobs_before_training(planned)
    if not jobs or _is_complete(run_directory(planned.spec), planned.steps):
        return Proven()
    if not planned.spec.run.verify:
        return _unproven(f"run.verify = false ({planned.spec.provenance.get('run.verify', 'python')})", say)
    because = cannot_be_handed_over(planned)
    if because:
        return _unproven(because, say)
    key = proof_key(planned, jobs)
    record = None if key is None else _recall(_path(key))
    if record is None:
        record = _prove(planned, standby)
        if key is not None:
            _remember(record, _path(key), say)
    else:
        record = dataclasses.replace(record, cached=True, seconds=0.0, text=_cached_text(record))
    say(f"verify   {record.text}")
    return Proven(record)


def jobs_before_training(planned: Planned) -> list[Job]:
    """Return what the proof before training runs."""
    return jobs_of(Subject(planned.spec, planned.plan, planned.facts.vocab, DTYPES), _scope(planned))


def _scope(planned: Planned) -> str:
    return ALONE if planned.plan.layout.devices == 1 else BRIEF


def _prove(planned: Planned, standby: StartsApart | None) -> VerifyRecord:
    from paceline.verify.process.start import failure_of, verify_planned, verify_text  # one device proves nothing

    proof = verify_planned(planned, steps=STEPS, dtypes=DTYPES, scope=_scope(planned), standby=standby)
    if not proof.equal:
        raise failure_of(proof, str(planned.spec.path or ""))
    return VerifyRecord(
        equal=True,
        verdict=proof.verdict or "",
        ill_conditioned=dataclasses.asdict(proof.ill_conditioned) if proof.ill_conditioned else None,
        seconds=proof.seconds,
        differences=proof.differences,
        dtype=", ".join([*DTYPES, *(dtype for dtype in proof.dtypes if dtype in LOW)]),
        layout=proof.ran_as or "",
        text=verify_text(proof),
        proved=datetime.datetime.now(datetime.UTC).date().isoformat(),
        cached=False,
    )


def _unproven(because: str, say: Say) -> Proven:
    """Return the decision to train without a proof."""
    say(f"verify   not proven: {because}")
    return Proven(None, (DecisionRecord("verify", "prove the layout", "no proof", because, None),))


def cannot_be_handed_over(planned: Planned) -> str:
    """Return why no other process can have the task, or "" where it can: a proof runs in processes of its own."""
    if not holds_objects(planned.spec):
        return ""
    try:
        with Scratch("spec") as folder:
            hand_over(planned.spec, Path(folder))
    except ConfigError as error:
        return f"{error.what}: {error.because}"
    return ""


def _is_complete(run_dir: Path, steps: int) -> bool:
    """Return whether the journal says that the run has reached its end: nothing is left to be proved."""
    return any(end.status == "complete" and (end.step or 0) >= steps for end in read_kind(run_dir, RunEnded))


# ---- proofs made before --------------------------------------------------------------------------------------------


def _path(key: str) -> Path:
    return cache_dir() / "proofs" / f"{key}.json"


def _recall(path: Path) -> VerifyRecord | None:
    """Return the proof that was remembered there, or None; one that cannot be read is made again."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and record.get("equal") is True and {"text", "proved"} <= set(record)
    return read(VerifyRecord, record) if whole else None


def _remember(record: VerifyRecord, path: Path, say: Say) -> None:
    try:
        write_json(own_fields(record), path)
    except StorageError as error:  # the next start proves again
        say(f"verify   the proof is not remembered: {error.because}")


def _cached_text(record: VerifyRecord) -> str:
    head, _, _ = record.text.rpartition(" (")
    return f"{head} (proved {record.proved}, cached)"
