"""A sink that is a file of JSON lines, one for each alert."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.observe.alerts.message import AlertMessage


def append_line(path: Path, message: AlertMessage) -> None:
    """Append the alerts of a message, each with the run that it is of. Raises OSError."""
    plain = message.as_json()
    own = {key: plain[key] for key in ("format", "run", "run_dir", "host")}
    lines = "".join(json.dumps({**own, **alert}) + "\n" for alert in plain["alerts"])
    path.expanduser().parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, lines.encode())
    finally:
        os.close(file)
