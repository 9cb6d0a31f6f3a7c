"""The journal as TensorBoard event files, while a run goes on or afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import MissingExtra, StorageError
from paceline.report.records import number, table, text
from paceline.run.record.journal import read_journal

FOLDER = "tensorboard"
SCALARS = {"loss": "loss/training", "grad_norm": "optimisation/grad_norm", "lr": "optimisation/learning_rate",
           "loss_scale": "optimisation/loss_scale", "tokens_per_second": "speed/tokens_per_second",
           "peak_bytes": "memory/peak_bytes"}  # fmt: skip


class TensorBoardWriter:
    """Writes journal records to RUN/tensorboard, one `record` at a time; use it in a `with` block.

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

    def record(self, record: Mapping[str, Any]) -> None:
        """Write what TensorBoard can show of one journal record; other kinds and missing fields are passed over.

        A record without `time` is taken to be written now.
        """
        kind, step = record.get("kind"), number(record.get("step"))
        moment = number(record.get("time"))
        if moment is None:
            moment = time.time()
        if step is not None:
            self._step = int(step)
        if kind == "run_started":
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            event = self._event.Event(wall_time=moment, step=self._step + 1, session_log=start)
            self._file.add_event(event)
            self._text("run", "\n".join(text(line) for line in _lines(record.get("headline"))), moment)
        elif kind == "step":
            seconds = table(record.get("seconds"))
            for name, tag in SCALARS.items():
                self._scalar(tag, record.get(name), moment)
            for name, turn in table(record.get("turns")).items():
                self._scalar(f"loss/{name}", table(turn).get("loss"), moment)
            for name, value in seconds.items():
                self._scalar("speed/step_seconds" if name == "total" else f"seconds/{name}", value, moment)
        elif kind == "evaluation":
            self._scalar("loss/held_out", record.get("loss"), moment)
        elif kind in ("decision", "fault"):
            self._text(kind, f"{text(record.get('what'))}, because {text(record.get('because'))}", moment)

    def close(self) -> None:
        """Flush and close the event file."""
        self._file.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalar(self, tag: str, value: Any, moment: float) -> None:
        known = number(value)
        if known is not None:
            self._write(self._summary.Summary.Value(tag=tag, simple_value=known), moment)

    def _text(self, tag: str, words: str, moment: float) -> None:
        if words:
            plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
            content = self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[words.encode()])
            content.tensor_shape.dim.add(size=1)
            metadata = self._summary.SummaryMetadata(plugin_data=plugin)
            self._write(self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=content), moment)

    def _write(self, value: Any, moment: float) -> None:
        summary = self._summary.Summary(value=[value])
        self._file.add_event(self._event.Event(wall_time=moment, step=self._step, summary=summary))


def _lines(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def export_tensorboard(run_dir: Path) -> Path:
    """Write the whole journal of a run as event files, in place of earlier ones, and return their folder."""
    folder = Path(run_dir) / FOLDER
    earlier = list(folder.glob("events.out.tfevents.*"))
    with TensorBoardWriter(run_dir) as writer:
        for record in read_journal(Path(run_dir)):
            writer.record(record)
    for path in earlier:
        path.unlink()
    return folder
