"""A run's directory, read: the journal's records, the spec, the checkpoints, the weights, the report. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.called import argument, checked_call
from paceline.config.fields import HeldWord
from paceline.errors import ConfigError, StorageError, suggestion
from paceline.report.build import build_report
from paceline.report.summary import Summary
from paceline.session.verbs.weights import BEST, Exported, choose_checkpoint, export_run
from paceline.spec.import_paths import DATA_SETS, METRICS
from paceline.spec.journal.kinds import BY_KIND
from paceline.spec.journal.reading import read_journal
from paceline.spec.load import Spec, spec_from_dict
from paceline.spec.run_files import is_run, runs_inside

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.session.evaluating import EvaluatedCheckpoint
    from paceline.spec.task import Task


BEST_STEP = HeldWord(-1)  # what "best" is held as
STEP = dataclasses.replace(argument("whole", optional=True, minimum=0), words={BEST: BEST_STEP})


@dataclass(frozen=True)
class RunFolder:
    """What a run has left in its directory. Everything is read when it is asked for."""

    dir: Path

    @checked_call(kind=argument("text"))
    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the journal's records, oldest first; those of one kind ("step", "decision", ...) where it is given.

        Raises ConfigError for a kind that neither this version nor the journal has.
        """
        records = list(read_journal(self.dir))
        known = {*BY_KIND, *(record["kind"] for record in records)}
        if kind and kind not in known:
            raise ConfigError(f"records of the kind '{kind}'", "no journal has such records", suggestion(kind, known))
        return [record for record in records if kind in ("", record["kind"])]

    @cached_property
    def spec(self) -> Spec:
        """The spec of the newest start. Raises StorageError where the journal has none."""
        starts = self.records("run_started")
        if not starts:
            raise StorageError(f"{self.dir} tells no spec", "its journal has no start", "a run that has begun")
        return spec_from_dict(starts[-1]["spec"], origin=f"the journal in {self.dir}")

    @checked_call()
    def summary(self) -> Summary:
        """Return the report's content, without writing the page. Raises StorageError where the journal is empty."""
        return build_report(self.dir)

    @checked_call(step=STEP)
    def checkpoint(self, step: int | str | None = None) -> Path:
        """Return the folder of the newest checkpoint that is sound in every byte, or of a step, or "best".

        Raises ConfigError where there is none, StorageError where none is sound.
        """
        return choose_checkpoint(self.dir, _asked(step)).path

    @checked_call(step=STEP)
    def weights(self, step: int | str | None = None) -> Mapping[str, Tensor]:
        """Return the model's whole tensors by name, each built when it is asked for. Raises as `checkpoint`."""
        from paceline.checkpoint import WholeTensors

        return WholeTensors(choose_checkpoint(self.dir, _asked(step)).path)

    @checked_call(out=argument("text"), step=STEP, merge=argument("flag"))
    def export(self, out: str | Path, step: int | str | None = None, *, merge: bool = False) -> Exported:
        """Write the weights as safetensors into the folder `out`, as `paceline export` does. Raises as `checkpoint`.

        Of a run with adapters these alone are written, or with `merge` whole weights with the adapters added to them.
        """
        return export_run(self.dir, Path(out), _asked(step), merge=merge)

    @checked_call(
        source=argument("text", objects=DATA_SETS),
        step=STEP,
        samples=argument("whole", optional=True, minimum=1),
        metrics=argument("texts", objects=METRICS),
        task=argument("object", optional=True, objects={"global_batch": "a paceline.Task"}),
    )
    def evaluate(
        self,
        source: object = "",
        step: int | str | None = None,
        samples: int | None = None,
        metrics: Sequence[object] = (),
        task: Task | None = None,
    ) -> EvaluatedCheckpoint:
        """Return the mean loss and the metrics on what the run held out, or on a source, as `paceline evaluate` does.

        `task` is needed where a model or data were given as objects: a checkpoint does not have those. Raises as
        `checkpoint`, and the errors of reading the data.
        """
        from paceline.session.evaluating import evaluate_run

        return evaluate_run(self.dir, source, _asked(step), samples, metrics, task)


def open_run(run_dir: Path) -> RunFolder:
    """Return a run's directory. Raises ConfigError where it is none, naming one that is near."""
    if not is_run(run_dir):
        because = "it has no folder `journal`" if run_dir.exists() else "there is no such folder"
        raise ConfigError(f"'{run_dir}' is not a run's directory", because, _runs_near(run_dir))
    return RunFolder(run_dir)


def _asked(step: int | str | None) -> int | str | None:
    return BEST if step is BEST_STEP else step


def _runs_near(run_dir: Path) -> str:
    folders = {run_dir, run_dir.parent, Path("runs")}
    known = [str(found) for folder in folders for found in runs_inside(folder)]
    return suggestion(str(run_dir), known) if known else "paceline train SPEC makes one"
