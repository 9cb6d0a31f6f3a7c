"""The recorder: everything a run says, to the journal and to the terminal. Only rank 0's says anything."""

from __future__ import annotations

import dataclasses
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import __version__
from paceline.errors import DataError, PacelineError, Requeue, StorageError
from paceline.run.loop.resume import Progress, Restored
from paceline.run.loop.step import StepStats
from paceline.run.memory.spent import MemoryMeter
from paceline.run.process.brief import Brief
from paceline.run.process.supervisor import is_supervised
from paceline.run.process.world import World
from paceline.run.record.journal import Journal
from paceline.run.record.observe import remember_run
from paceline.run.record.redact import Redactor
from paceline.run.record.status import StatusLine
from paceline.spec.load import Spec, spec_to_dict


class Recorder:
    """Writes the journal and the status lines of one start of a run."""

    def __init__(
        self,
        run_dir: Path,
        spec: Spec,
        brief: Brief,
        world: World,
        meter: MemoryMeter,
        log_every: int,
        fence: Callable[[], None] | None = None,
    ) -> None:
        self._run_dir, self._journal = run_dir, Journal(run_dir, fence, Redactor(spec.run.redact), spec.run.group_read)
        self._status = StatusLine(brief, log_every)
        self._spec, self._brief, self._world, self._meter = spec, brief, world, meter
        self._ended = False
        self._tensorboard = _tensorboard(run_dir) if spec.run.tensorboard else None

    def _write(self, kind: str, **fields: Any) -> None:
        written = self._journal.write(kind, **fields)
        if self._tensorboard is not None:
            self._tensorboard.record(written)

    def started(self, progress: Progress, restored: Restored | None, unigram_loss: float | None) -> None:
        """Record what runs, on what, as planned, and from where it goes on."""
        facts = {**self._brief.record["facts"], "unigram_loss": unigram_loss}
        self._write(
            "run_started",
            attempt=self._journal.attempt,
            resumed_from=str(restored.path) if restored else None,
            step=progress.step,
            position=progress.position,
            spec=spec_to_dict(self._spec),
            plan=dataclasses.asdict(self._brief.plan),
            plan_text=str(self._brief.plan),
            world_size=self._world.size,
            versions={"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
            host=platform.node(),
            command=sys.argv,
            **{**{k: v for k, v in self._brief.record.items() if k not in ("decisions", "verify")}, "facts": facts},
        )
        for decision in self._brief.record.get("decisions", ()):
            self._journal.decision(**decision)
        if verify := self._brief.record.get("verify"):
            self._write("verify", **verify)
        if restored is not None:
            for note in restored.notes:
                self._journal.decision("resume", None, str(restored.path), note)
                self.say(f"resume   {note}")
            self.say(f"resume   step {progress.step} from {restored.path}")

    def remark(self, text: str) -> None:
        """Say and record what has no part in training."""
        self._journal.decision("left out", None, None, text)
        self.say(f"note     {text}")

    def step(self, stats: StepStats, loss_scale: float | None, sample_ids: list[int] | None) -> None:
        """Record a step."""
        optional: dict[str, Any] = {}
        if loss_scale is not None:
            optional |= {"loss_scale": loss_scale, "updated": stats.updated}
        if stats.waiting_seconds is not None:
            optional["waiting_seconds"] = stats.waiting_seconds
        if stats.router is not None:
            optional["router"] = stats.router.as_dict()
        if stats.turns:
            optional["turns"] = {name: dataclasses.asdict(turn) for name, turn in stats.turns.items()}
        if sample_ids is not None:
            optional["sample_ids"] = sample_ids
        self._write(
            "step",
            step=stats.step,
            position_before=stats.position_before,
            position_after=stats.position_after,
            loss=stats.loss,
            weight=stats.weight,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            seconds=stats.seconds,
            tokens_per_second=stats.weight / stats.seconds["total"],
            peak_bytes=self._meter.peak_bytes(),
            **optional,
        )
        self._status.step(stats)

    def evaluation(self, step: int, result: dict[str, float]) -> None:
        """Record an evaluation."""
        self._write("evaluation", step=step, **result)
        self.say(f"held-out loss {result['loss']:.4f} after step {step}")

    def checkpoint(self, step: int, path: Path, size: int, seconds: float) -> None:
        """Record a published checkpoint."""
        self._write("checkpoint", step=step, path=str(path), bytes=size, seconds=seconds)

    def memory(self, step: int, components: dict[str, float], peak: float) -> None:
        """Record what memory is spent on, on the fullest rank."""
        self._write("memory", step=step, components=components, peak_bytes=peak)

    def stopped(self, step: int, because: str, path: Path) -> None:
        """Record the decision to stop early."""
        self._journal.decision("stop", "training", "requeue", because, {"step": step, "checkpoint": str(path)})
        self.say(f"stop     {because}: step {step} is saved in {path}")

    def ended(self, status: str, step: int, seconds: float, error: BaseException | None = None) -> None:
        """Record how this start ended. Only the first call counts.

        What a peer's death brought about is left to the supervisor, where there is one: it knows the cause.
        """
        if self._ended:
            return
        self._ended = True
        if is_echo(error) and is_supervised():
            return
        details, code = describe(error)
        if error is not None and not isinstance(error, PacelineError | Requeue):
            details["traceback"] = "".join(traceback.format_exception(error))
        if error is not None and status == "failed":
            self._write("fault", what=details["what"], because=details["because"], rank=self._world.rank)
        self._write(
            "run_ended", status=status, exit_code=code, error=details if status == "failed" else None, step=step,
            seconds=seconds,
        )  # fmt: skip
        self._journal.close()
        if status == "complete" and self._spec.cluster.learn:
            self._remember()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _remember(self) -> None:
        """Leave what this run measured for the next forecast. A run that tells nothing is none the worse for it."""
        try:
            remember_run(self._run_dir)
        except (DataError, StorageError) as error:
            self.say(f"learn    the next forecast learns nothing from this run: {error.what}: {error.because}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._status.say(text)


class SilentRecorder:
    """What the other ranks hold: it records nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def describe(error: BaseException | None) -> tuple[dict[str, Any], int]:
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
    """Return whether the error only says that a peer has gone: the peer's own end is the cause."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _tensorboard(run_dir: Path) -> Any:
    # The exporter belongs to the report's floor, above this one; it only reads records, so it is looked up by name.
    from importlib import import_module

    return import_module("paceline.report.tensorboard").TensorBoardWriter(run_dir)
