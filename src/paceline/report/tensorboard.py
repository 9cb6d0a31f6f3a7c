"""The whole journal of a run as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from paceline.observe.exports.tensorboard import FOLDER, TensorBoardWriter
from paceline.spec.journal.reading import read_records


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
