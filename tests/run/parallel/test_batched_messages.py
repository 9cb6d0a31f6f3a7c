"""Messages between ranks on devices go in batches: NCCL deadlocks where two ranks send to each other one by one."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "paceline"
MESSAGES = {"isend", "irecv", "send", "recv"}
OF_THE_HOST = {"run/survive/saving/peers.py"}  # in a group of gloo's, which takes them as they come


def calls_of(path: Path) -> set[str]:
    """Return which of torch's messages a file sends by themselves, and not as part of a batch."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MESSAGES
        and ast.unparse(node.func.value).endswith("dist")
    }


def test_no_message_between_devices_goes_by_itself() -> None:
    rooms = [path for room in ("run", "checkpoint", "task", "verify") for path in (SOURCE / room).rglob("*.py")]
    assert len(rooms) > 300
    assert {str(path.relative_to(SOURCE)) for path in rooms if calls_of(path)} == OF_THE_HOST
    assert sum("batch_isend_irecv" in path.read_text(encoding="utf-8") for path in rooms) >= 4
