"""The sink that shows a run's records in TensorBoard, while the run goes on or afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from paceline.errors import MissingExtra, StorageError
from paceline.observe.exports.values import step_of, values_of
from paceline.run.record.sink import OpenSink
from paceline.said import say_line
from paceline.spec.journal.kinds import DecisionRecord, FaultRecord, RunStarted, StepRecord
from paceline.spec.journal.reading import read_records
from paceline.spec.journal.record import Record
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

        TensorBoard is told to drop the steps that are made again, after a start that resumes or within one.
    Raises MissingExtra where the package is not installed, StorageError where the folder cannot be written.
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
        step = step_of(record)
        if isinstance(record, RunStarted):
            self._drop_from((step or 0) + 1, moment)
            self._step = step or 0
            self._text("run", "\n".join(record.headline), moment)
        elif isinstance(record, StepRecord) and step is not None:
            if step <= self._step:  # it goes back to before them, within one start
                self._drop_from(step, moment)
            self._step = step
        elif isinstance(record, DecisionRecord | FaultRecord):
            self._text(record.KIND, f"{record.what}, because {record.because}", moment)
        for name, value in values_of(record).items():
            self._write(self._summary.Summary.Value(tag=name, simple_value=value), moment, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._file.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drop_from(self, step: int, moment: float) -> None:
        """Have TensorBoard drop what was written of a step and later ones."""
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._file.add_event(self._event.Event(wall_time=moment, step=step, session_log=start))

    def _text(self, tag: str, words: str, moment: float) -> None:
        if words:
            plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
            content = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[words.encode()])
            content.tensor_shape.dim.add(size=1)
            metadata = self._summary.SummaryMetadata(plugin_data=plugin)
            self._write(self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=content), moment)

    def _write(self, value: object, moment: float, step: int | None = None) -> None:
        summary, at = self._summary.Summary(value=[value]), self._step if step is None else step
        self._file.add_event(self._event.Event(wall_time=moment, step=at, summary=summary))


def export_tensorboard(run_dir: Path) -> Path:
    """Write the whole journal of a run as event files, in place of earlier ones, and return their folder."""
    folder = Path(run_dir) / FOLDER
    earlier = list(folder.glob("events.out.tfevents.*"))
    with TensorBoardWriter(run_dir) as writer:
        for record in read_records(Path(run_dir)):
            writer.write(record)
    for path in earlier:
        path.unlink()
    return folder
