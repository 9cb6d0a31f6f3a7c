"""The recorder: everything a run says, as records that sinks take. Only rank 0's says anything."""

from __future__ import annotations

import dataclasses
import platform
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.errors import DataError, PacelineError, Requeue, RunInUse, StorageError
from paceline.foreign_errors import is_of_gloo, is_of_left_group, is_of_no_descriptor
from paceline.run.loop.evaluate import EvaluationResult
from paceline.run.loop.resume import Progress, Restored
from paceline.run.loop.step import StepStats
from paceline.run.memory.spent import MemoryMeter
from paceline.run.process.world import World
from paceline.run.record.clock_notes import begun_by_clock_here
from paceline.run.record.decisions import TellsDecisions
from paceline.run.record.sink import Sink
from paceline.run.survive.clouds.departing import Departure
from paceline.run.survive.faults.ledger import StruckFault
from paceline.run.survive.listener import was_aborted
from paceline.run.survive.written_by import versions_here
from paceline.spec.journal.bound import TraceRecord
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    DecisionRecord,
    EvaluationRecord,
    FaultRecord,
    InjectedRecord,
    LoggedRecord,
    MemoryRecord,
    MovedRecord,
    RanksRecord,
    RecoveryRecord,
    ReplayRecord,
    RunEnded,
    RunStarted,
    SelectionRecord,
    SourcesRecord,
    StepRecord,
    WrittenRecord,
)
from paceline.spec.journal.record import Record, Table, now
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.watching import HealthSample, NodeSample
from paceline.spec.load import Spec, spec_to_dict
from paceline.spec.plan import Plan
from paceline.spec.watch.samples import SamplesSpec
from paceline.supervise.again.told_before import is_told, told_before
from paceline.supervise.supervisor import is_supervised
from paceline.supervise.told.brief import Brief
from paceline.units import format_seconds, plural


class Recorder(TellsDecisions):
    """Makes the records of one start of a run, and hands them to every sink."""

    def __init__(
        self, run_dir: Path, attempt: int, spec: Spec, brief: Brief, world: World, meter: MemoryMeter,
        sinks: Sequence[Sink],
    ) -> None:  # fmt: skip
        """`attempt` is the number of the start; `sinks` are closed when it ends."""
        super().__init__()
        self._run_dir, self._attempt, self._sinks = run_dir, attempt, sinks
        self._redactor = Redactor(spec.run.redact)
        self._spec, self._brief, self._world, self._meter = spec, brief, world, meter
        self._ended = False
        self._told_before = set[str]()  # by earlier starts, where this one goes on in a further world

    def _write(self, record: Record) -> None:
        if not isinstance(record, StepRecord):  # which holds no text
            record = self._redactor.record(record)
        for sink in self._sinks:
            sink.write(record)

    def _write_new(self, record: Record) -> None:
        """Write a record that no earlier start has told, where this one goes on in a further world."""
        if not is_told(self._redactor.record(record), self._told_before):
            self._write(record)

    def started(
        self, progress: Progress, restored: Restored | None, unigram_loss: float | None, began: float | None = None,
        fingerprint: str = "", goes_on: bool = False,
    ) -> None:  # fmt: skip
        """Record what runs, on what, as planned, and from where it goes on; `fingerprint` is that of the data.

        When it `began` is in `passed_seconds`. Where it `goes_on` in a further world of one call, what an earlier start
        has told is not told again.
        """
        self._told_before = told_before(self._run_dir) if goes_on else set()
        known = self._brief.record
        facts = {"unigram_loss": unigram_loss, **({"fingerprint": fingerprint} if fingerprint else {})}
        started = RunStarted(
            attempt=self._attempt,
            resumed_from=str(restored.path) if restored else None,
            step=progress.step,
            position=progress.position,
            spec=spec_to_dict(self._spec),
            plan=dataclasses.asdict(self._brief.plan),
            plan_text=str(self._brief.plan),
            world_size=self._world.size,
            versions=versions_here(),
            host=platform.node(),
            command=self._brief.command,
            cluster=known.cluster,
            forecast=known.forecast,
            placement=known.placement,
            facts={**known.facts, **facts},
            parameters=known.parameters,
            profile=known.profile,
            optimizer=known.optimizer,
            headline=known.headline,
            provenance=known.provenance,
            outlook=known.outlook or None,
        )
        self._write(begun_by_clock_here(started, began))
        for decision in known.decisions:
            self._write_new(now(decision))
        for switched in self._world.switched:
            self._write_new(now(DecisionRecord(**vars(switched), evidence=None)))
        if known.verify is not None:
            self._write_new(now(known.verify))
        if restored is not None:
            for note in restored.notes:
                self._decided("resume", None, str(restored.path), note)
                self.say(f"resume   {note}")
            self.say(f"resume   step {progress.step} from {restored.path}")

    def replayed(self, record: ReplayRecord) -> None:
        """Record and say how the first step after a resume stands to the one of an earlier start."""
        self._write(record)
        off = ", ".join(f"{name.replace('_', ' ')} {value:.0e}" for name, value in record.differences.items() if value)
        found = f"equal to rounding: {off}" if off else "bit for bit the same"
        self.say(f"resume   step {record.step} made again, {found}")

    def remark(self, text: str) -> None:
        """Say and record what has no part in training."""
        self._decided("left out", None, None, text)
        self.say(f"note     {text}")

    def step(self, stats: StepStats, loss_scale: float | None, sample_ids: list[int] | None) -> None:
        """Record a step."""
        turns = {name: dataclasses.asdict(turn) for name, turn in stats.turns.items()}
        items = self._brief.items_of_step(stats.position_after - stats.position_before, stats.weight)
        self._write(
            StepRecord(
                step=stats.step,
                position_before=stats.position_before,
                position_after=stats.position_after,
                loss=stats.loss,
                weight=stats.weight,
                grad_norm=stats.grad_norm,
                lr=stats.lr,
                seconds=stats.seconds,
                tokens_per_second=items / stats.seconds["total"],
                peak_bytes=self._meter.peak_bytes(),
                loss_scale=loss_scale,
                updated=None if loss_scale is None and stats.updated else stats.updated,
                waiting_seconds=stats.waiting_seconds,
                router=stats.router.as_dict() if stats.router else None,
                turns=turns or None,
                sample_ids=None if sample_ids is None else tuple(sample_ids),
            )
        )

    def ranks(self, record: RanksRecord | None) -> None:
        """Record where steps spent their time on all ranks, and what bounds them, where enough have been made."""
        if record is not None:
            self._write(record)
            from paceline.verdict.live import verdict_record  # after some steps, and a dozen files

            verdict = verdict_record(record, self._brief.record.outlook)
            if verdict is not None:
                self._write(verdict)

    def traced(self, record: TraceRecord) -> None:
        """Record and say that steps were traced, as somebody has asked."""
        self._write(record)
        self.say(f"trace    steps {record.first} to {record.last}, asked for by {record.by}: {record.path}")

    @property
    def attempt(self) -> int:
        """The number of the start."""
        return self._attempt

    def nodes(self, samples: Sequence[NodeSample]) -> None:
        """Record what the first node's sampler has read."""
        for sample in samples:
            self._write(sample)

    def health(self, samples: Sequence[HealthSample]) -> None:
        """Record how a step's blocks were, and say what stands out."""
        for sample in samples:
            self._write(sample)
            for each in sample.told:
                where = f" in {each['block']}" if each["block"] else ""
                seen = f"{each['detector']}{where} in step {sample.step}: {each['evidence']}"
                self.say(f"health   {seen}; try: {each['advice']}")

    def evaluation(self, step: int, measured: EvaluationResult, sets: Mapping[str, EvaluationResult]) -> None:
        """Record an evaluation, and what it gave on further sets."""
        seconds = measured.seconds + sum(each.seconds for each in sets.values())
        further = {name: _of_set(each) for name, each in sets.items()}
        metrics = dict(measured.metrics) or None
        self._write(EvaluationRecord(step, measured.loss, measured.weight, seconds, metrics, further or None))

    def moved(self, record: MovedRecord | None) -> None:
        """Record how far a model has moved from the weights that it started from, where that is known."""
        if record is not None:
            self._write(record)
            farthest = max(record.blocks, key=lambda name: record.blocks[name]["distance"])
            self.say(
                f"moved    {record.distance:.2%} from the starting weights, {farthest} most: "
                f"{record.blocks[farthest]['distance']:.2%}"
            )

    def sources(self, step: int, position: int, given: dict[str, dict[str, float]]) -> None:
        """Record what each source of a mixture has given so far."""
        self._write(SourcesRecord(step, position, given))

    def checkpoint(
        self, step: int, path: Path | str, size: int, seconds: float, stall_seconds: float, tier: str | None = None
    ) -> None:
        """Record a published checkpoint."""
        self._write(CheckpointRecord(step, str(path), size, seconds, stall_seconds, tier))

    def fault(
        self, what: str, because: str, rank: int | None = None, evidence: Table | None = None,
        names_ranks: bool | None = None,
    ) -> None:  # fmt: skip
        """Say and record what went wrong and does not end the run."""
        self._write(FaultRecord(what, because, rank, names_ranks=names_ranks, evidence=evidence))
        self.say(f"warning  {what}: {because}")

    def selected(self, record: SelectionRecord | None) -> None:
        """Record which of a step's candidates were trained on."""
        if record is not None:
            self._write(record)

    def memory(self, step: int, components: dict[str, float], peak: float) -> None:
        """Record what memory is spent on, on the fullest rank."""
        self._write(MemoryRecord(step, components, peak))

    def stopped(self, step: int, because: str, path: Path, becomes: str = "requeue") -> None:
        """Record the decision to stop early, with the newest checkpoint that there is."""
        self._decided("stop", "training", becomes, because, {"step": step, "checkpoint": str(path)})
        self.say(f"stop     {because}: after step {step} the newest checkpoint is {path}")

    def leaves(self, step: int, departure: Departure, path: Path) -> None:
        """Record that nodes leave the run after a step, and that the others go on; `path` is the newest checkpoint."""
        evidence = {"step": step, "ranks": list(departure.ranks), "checkpoint": str(path)}
        self._decided("nodes", "all of them", f"without {departure}", departure.because, evidence)
        self.say(f"leaves   {departure} after step {step}: {departure.because}")

    def written(self, step: int, samples: SamplesSpec, texts: Sequence[str], seconds: float) -> None:
        """Record what the model wrote."""
        self._write(WrittenRecord(step, samples.temperature, samples.prompts, tuple(texts), seconds))

    def logged(self, step: int, by: str, values: Mapping[str, float]) -> None:
        """Record numbers that a callback gave."""
        self._write(LoggedRecord(step, by, dict(values)))

    def recovered(self, record: RecoveryRecord | None) -> None:
        """Record that the run goes on after a fault, where it has just done so."""
        if record is not None:
            self._write(record)
            took, lost = format_seconds(record.seconds["total"]), record.steps_lost
            self.say(f"recover  {took} by {record.rung}, {plural(lost or 0, 'step')} made again: {record.because}")

    def replanned(self, step: int, before: Plan, plan: Plan) -> None:
        """Record that the run goes on under another plan, and say where that one rounds otherwise."""
        because = f"resharded from layout {before.layout} to {plan.layout} after step {step}"
        self._decided("replan", str(before.layout), str(plan.layout), because)
        self.say(f"replan   {because}")
        if before.precision != plan.precision:
            told = f"the plan's precision was {before.precision} and is now {plan.precision}: numbers round otherwise"
            self.decided("replan", before.precision, plan.precision, told)

    def injected(self, strikes: Sequence[StruckFault]) -> None:
        """Record and say that faults have struck that were made on purpose."""
        for each in strikes:
            self._write(InjectedRecord(each.fault, each.kind, each.step, each.phase, each.rank, each.time))
            where = f"in {each.phase} of step {each.step}" if each.phase else f"in step {each.step}"
            self.say(f"fault    {each.fault} ({each.kind}) has struck rank {each.rank} {where}, as planned")

    def ended(
        self, status: str, step: int, seconds: float, error: BaseException | None = None, goes_on: float | None = None
    ) -> None:
        """Record how this start ended, and when its hours begin again where they are over. Only the first call counts.

        What a peer's death brought about is left to the supervisor, where there is one: it knows the cause. Raises
        StorageError where a run that is complete has lost records of its journal.
        """
        if self._ended:
            return
        self._ended = True
        if is_echo(error) and is_supervised():
            return
        details, code = describe(error)
        if error is not None and not isinstance(error, PacelineError | Requeue):
            details["traceback"] = "".join(traceback.format_exception(error))
        try:
            with ExitStack() as closing:
                for sink in self._sinks:
                    closing.callback(sink.close)
                if error is not None and status == "failed":
                    self._write(
                        FaultRecord(
                            str(details["what"]),
                            str(details["because"]),
                            self._world.rank,
                            names_ranks=True if details.get("names_ranks") else None,
                        )
                    )
                self._write(RunEnded(status, code, details if status == "failed" else None, step, seconds, goes_on))
        except StorageError as lost:
            if status == "complete" or isinstance(lost, RunInUse):
                raise
            self.say(f"warning  {lost.what}: {lost.because}")  # the run ends for another reason, which is told
        if status == "complete" and self._spec.cluster.learn:
            self._remember()

    def _remember(self) -> None:
        """Leave what this run measured for the next forecast. A run that tells nothing is none the worse for it."""
        from paceline.plan.learn.observe import remember_run  # with the planner, which no rank needs before its end

        try:
            remember_run(self._run_dir)
        except (DataError, StorageError) as error:
            self.say(f"learn    the next forecast learns nothing from this run: {error.what}: {error.because}")


class SilentRecorder:
    """What the other ranks hold: it records nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def describe(error: BaseException | None) -> tuple[dict[str, object], int]:
    """Return an error as plain data and the exit code that goes with it."""
    if error is None:
        return {}, 0
    if isinstance(error, KeyboardInterrupt):
        again = "start the same command again: it resumes from the last checkpoint"
        return {"error": "KeyboardInterrupt", "what": "interrupted", "because": "Ctrl-C", "try": again}, 130
    code = int(getattr(error, "exit_code", 1))
    if isinstance(error, PacelineError):
        return error.as_dict(), code
    return {"error": type(error).__name__, "what": f"{type(error).__name__}: {error}", "because": "", "try": ""}, code


def is_echo(error: BaseException | None) -> bool:
    """Return whether the error only says that a peer has gone, or that this process has left its world.

    A store that this process could not open for lack of descriptors says nothing of peers.
    """
    if isinstance(error, Exception) and not isinstance(error, PacelineError) and was_aborted():
        return True
    if error is None or is_of_no_descriptor(error):
        return False
    return isinstance(error, dist.DistError) or is_of_gloo(error) or is_of_left_group(error)


def _of_set(measured: EvaluationResult) -> dict[str, object]:
    """Return what a further set of held-out data gave, as the journal keeps it."""
    found: dict[str, object] = {"loss": measured.loss, "weight": measured.weight}
    return {**found, "metrics": dict(measured.metrics)} if measured.metrics else found
