"""How a user's loop was left: by its own `break` or `return`, or by an error of its body.

Python closes a generator in the same way for all of them. What differs is where the loop's function stood then: an
error that reaches anybody later carries that very instruction in its traceback.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

from paceline.errors import RunInUse
from paceline.run.record.recorder import Recorder, SilentRecorder

# What a loop that is left on purpose executes as its iterator goes away. None of these can raise.
ON_PURPOSE = {"POP_TOP", "POP_ITER", "SWAP", "END_FOR", "RETURN_VALUE", "RETURN_CONST"}


@dataclass(frozen=True)
class LeftLoop:
    """The function in which a loop was left, and the instruction that it was at."""

    code: CodeType
    instruction: int

    @property
    def on_purpose(self) -> bool:
        """Whether the loop surely ended by itself. Otherwise an error may be on its way."""
        return dis.opname[self.code.co_code[self.instruction]] in ON_PURPOSE

    def by_error(self) -> BaseException | None:
        """Return the error that nobody caught and that left the loop here, if there is one.

        Scripts, prompts and notebooks keep the last error that they showed in `sys`.
        """
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        shown = error
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code is self.code and trace.tb_lasti == self.instruction:
                    return shown if isinstance(shown, BaseException) else None
                trace = trace.tb_next
            error = error.__cause__ or error.__context__
        return None


def left_at(frame: FrameType | None) -> LeftLoop | None:
    """Return where a loop's function stands, None where no Python code runs (the interpreter is ending)."""
    return LeftLoop(frame.f_code, frame.f_lasti) if frame is not None and frame.f_lasti >= 0 else None


def record_left(record: Recorder | SilentRecorder, loop: LeftLoop, step: int, seconds: float) -> None:
    """Record how a run ended whose loop was left by what may have been an error: it is known by now."""
    error = loop.by_error()
    with contextlib.suppress(RunInUse):  # this process has begun the run anew: the older start has ended with that
        record.ended("stopped" if error is None else "failed", step, seconds, error)
