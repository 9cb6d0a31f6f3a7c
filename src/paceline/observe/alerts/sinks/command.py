"""A sink that is a shell command: it gets the message as JSON on standard input, and its text in PACELINE_ALERT."""

from __future__ import annotations

import json
import os
import signal
import subprocess

from paceline.errors import PacelineError
from paceline.observe.alerts.message import AlertMessage


def run_command(command: str, message: AlertMessage, timeout_seconds: float) -> None:
    """Run a command with the message. Raises PacelineError where it does not end in time, or not with 0.

    What it prints is kept nowhere: it may hold secrets.
    """
    environ = {**os.environ, "PACELINE_ALERT": message.as_text()}
    with subprocess.Popen(
        ["/bin/sh", "-c", command], env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, process_group=0,
    ) as process:  # fmt: skip
        try:
            process.communicate(json.dumps(message.as_json()).encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise PacelineError("a command took too long", f"it has not ended in {timeout_seconds:g} s") from None
    if process.returncode:
        raise PacelineError("a command failed", f"it ended with code {process.returncode}")
