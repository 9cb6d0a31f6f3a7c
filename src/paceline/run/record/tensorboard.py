"""The sink that shows a run's records in TensorBoard, while the run goes on or afterwards."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import TracebackType

from paceline.errors import MissingExtra, StorageError
from paceline.run.record.sink import OpenSink
from paceline.said import say_line
from paceline.spec.journal.kinds import (
    DecisionRecord,
    EvaluationRecord,
    FaultRecord,
    LoggedRecord,
    RunStarted,
    StepRecord,
)
from paceline.spec.journal.record import Record, number
from paceline.spec.run import RunSpec

FOLDER = "tensorboard"


def asked_sinks(run: RunSpec) -> list[OpenSink]:
    """Return the sinks that the run's options ask for, for whoever starts it to hand in."""
    return [TensorBoardSink] if run.tensorboard else []


class TensorBoardSink:
    """Shows a run's records while it trains. A disk that takes no more costs the pictures, with a warning."""

    def __init__(self, run_dir: Path) -> None:
        self._writer: TensorBoardWriter | None = TensorBoardWriter(run_dir)

    def write(self, record: Record) -> None:
        """Write what TensorBoard can show of one record."""
        if self._writer is not None:
            try:
                self._writer.write(record)
            except OSError as error:  # that of an earlier record: they are written in a thread
                self._give_up(error)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        assert self._writer is not None
        say_line(f"warning  event files in {self._writer.folder} end here: {error}; export_tensorboard makes them anew")
        self._writer = None


class TensorBoardWriter:
    """Writes records to RUN/tensorboard, one at a time; use it in a `with` block, or close it.

    A start that resumes tells TensorBoard to drop what an earlier start wrote beyond that step. Raises MissingExtra
    where the package is not installed, StorageError where the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "writing TensorBoard event files") from error
        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        self.folder = Path(run_dir) / FOLDER
        self._step = 0
        try:
            self._file = EventFileWriter(str(self.folder))
        except OSError as error:
            raise StorageError(
                f"cannot write event files in {self.folder}", str(error), "free space or turn run.tensorboard off"
            ) from error

    def write(self, record: Record) -> None:
        """Write what TensorBoard can show of one record; other kinds and missing fields are passed over.

        A record without `time` is taken to be written now.
        """
        moment = time.time() if record.time is None else record.time
        step = getattr(record, "step", None)
        if step is not None:
            self._step = step
        if isinstance(record, RunStarted):
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            event = self._event.Event(wall_time=moment, step=self._step + 1, session_log=start)
            self._file.add_event(event)
            self._text("run", "\n".join(record.headline), moment)
        elif isinstance(record, StepRecord):
            self._scalars(record, moment)
        elif isinstance(record, EvaluationRecord):
            self._scalar("loss/held_out", record.loss, moment)
            for name, value in (record.metrics or {}).items():
                self._scalar(f"held_out/{name}", value, moment)
            for name, of_set in (record.sets or {}).items():
                for what, value in {"loss": of_set["loss"], **(of_set.get("metrics") or {})}.items():
                    self._scalar(f"held_out.{name}/{what}", value, moment)
        elif isinstance(record, LoggedRecord):
            for name, value in record.values.items():
                self._scalar(f"{record.by}/{name}", value, moment)
        elif isinstance(record, DecisionRecord | FaultRecord):
            self._text(record.KIND, f"{record.what}, because {record.because}", moment)

    def close(self) -> None:
        """Flush and close the event file."""
        self._file.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalars(self, record: StepRecord, moment: float) -> None:
        self._scalar("loss/training", record.loss, moment)
        self._scalar("optimisation/grad_norm", record.grad_norm, moment)
        self._scalar("optimisation/learning_rate", record.lr, moment)
        self._scalar("optimisation/loss_scale", record.loss_scale, moment)
        self._scalar("speed/tokens_per_second", record.tokens_per_second, moment)
        self._scalar("memory/peak_bytes", record.peak_bytes, moment)
        for name, turn in (record.turns or {}).items():
            self._scalar(f"loss/{name}", number(turn.get("loss")) if isinstance(turn, dict) else None, moment)
        for name, value in record.seconds.items():
            self._scalar("speed/step_seconds" if name == "total" else f"seconds/{name}", value, moment)

    def _scalar(self, tag: str, value: float | None, moment: float) -> None:
        if value is not None and math.isfinite(value):
            self._write(self._summary.Summary.Value(tag=tag, simple_value=value), moment)

    def _text(self, tag: str, words: str, moment: float) -> None:
        if words:
            plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
            content = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[words.encode()])
            content.tensor_shape.dim.add(size=1)
            metadata = self._summary.SummaryMetadata(plugin_data=plugin)
            self._write(self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=content), moment)

    def _write(self, value: object, moment: float) -> None:
        summary = self._summary.Summary(value=[value])
        self._file.add_event(self._event.Event(wall_time=moment, step=self._step, summary=summary))
