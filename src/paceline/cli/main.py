"""The command line: picks the verb, runs it, and turns every ending into a message and an exit code.

Only the chosen verb's module is imported, and no verb imports torch before it needs it, so help is immediate.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import json
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from paceline.cli.json.shapes import FORMAT
from paceline.cli.output import print_error
from paceline.cli.parser import EXIT_CODES, Parser, add_common_arguments, epilog
from paceline.cluster.here.waiting import waiting
from paceline.config.other_words import verb_meant
from paceline.errors import ConfigError, PacelineError, Requeue
from paceline.said import flush_said, say_own_warnings
from paceline.supervise.early import terminated
from paceline.uncaught import own_place

VERBS = {
    "plan": "choose a layout and price it: time, memory, money, energy",
    "simulate": "weeks of the run on machines that fail: finish, goodput, policies",
    "verify": "prove that a layout computes the numbers of one device",
    "train": "plan, verify, train, report; resumes by itself",
    "trace": "where the time of some steps goes, of a job that runs",
    "report": "what a run took against what was forecast",
    "logs": "what ranks have printed: one, or all by their moments; what failed first",
    "dash": "runs as they go on, on a page of this machine; or as one file",
    "compare": "runs beside each other, and how sure it is that one is better",
    "bill": "what runs cost: device-hours, money, energy, carbon; by run, tag or day",
    "alerts": "what wakes somebody: try sinks, list alerts, silence rules",
    "deliver": "a run's journal to MLflow, trackio, W&B, Prometheus: what they have missed",
    "evaluate": "a run's weights on what it held out, or on a test set",
    "export": "a run's weights as safetensors, for transformers where the model is built in",
    "checkpoint": "a run's checkpoints: ls, show, verify, diff, convert",
    "backtest": "forecasts against measured tables, published ones or your own",
    "data": "prepare token shards, and look at what data hold",
    "doctor": "what is there for training here, and what to do about what is not",
    "bench": "measure what a task's steps take with their loader and without",
    "probe": "measure this machine: compute, memory, links",
    "schema": "the JSON schema of spec files, for editors",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Never raises, whatever the arguments are."""
    if arguments is None:  # the process is the command's own, and has not loaded torch
        _open_streams()
        os.environ.update(waiting(os.environ))
        say_own_warnings()
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in words
    _tolerate_any_character()
    try:
        code = _dispatch(words)
        flush_said()
        return code
    except PacelineError as error:
        for note in getattr(error, "__notes__", ()):  # the traceback of a rank
            print(note, file=sys.stderr)
        return _tell(error.as_dict(), str(error), as_json)
    except Requeue as stop:
        return _tell({"error": "Requeue", "what": "stopped early", "because": stop.because,
                      "try": "start the same command again", "exit_code": stop.exit_code},
                     f"stopped early\n  because  {stop.because}\n  try      start the same command again",
                     as_json, word="requeue")  # fmt: skip
    except KeyboardInterrupt:
        return _tell({"error": "KeyboardInterrupt", "what": "interrupted", "because": "Ctrl-C", "try": "",
                      "exit_code": 130}, "interrupted", as_json, word="stop")  # fmt: skip
    except BrokenPipeError:
        _mute_stdout()
        return 141  # 128 + SIGPIPE
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except ModuleNotFoundError as error:
        from paceline.session.doctor.examine import NEEDED

        if (error.name or "").partition(".")[0] not in NEEDED:
            return _defect(error, words, as_json)
        fix = "pip install paceline, which brings it; `paceline doctor` looks for the rest"
        missing = ConfigError(f"the package '{error.name}' is not installed", "Paceline stands on it", fix)
        return _tell(missing.as_dict(), str(missing), as_json)
    except Exception as error:
        return _defect(error, words, as_json)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_overview().format_help(), file=sys.stderr, end="")
        return 2
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    verb = words[0]
    if verb in ("-h", "--help", "--version"):
        _overview().read([verb])
    if verb.startswith("-"):
        near = difflib.get_close_matches(verb, ["--help", "--version"], n=1, cutoff=0.75)
        fix = f"did you mean '{near[0]}'?" if near else f"paceline VERB {verb}, with a VERB of {', '.join(VERBS)}"
        raise ConfigError(f"unknown option '{verb}'", "a verb comes first, its options after it", fix)
    if verb not in VERBS:
        raise ConfigError(f"unknown verb '{verb}'", "paceline has no such verb", verb_meant(verb, VERBS))
    module = importlib.import_module(f"paceline.cli.{verb}")
    options = _verb_parser(verb, module).read(words[1:])
    with contextlib.nullcontext() if verb == "train" else terminated():  # which has an end of its own
        return int(module.execute(options))


def _verb_parser(verb: str, module: ModuleType) -> Parser:
    parser = Parser(
        prog=f"paceline {verb}", description=(module.__doc__ or VERBS[verb]).strip(),
        epilog=epilog(module.EXAMPLE, module.CODES),
    )  # fmt: skip
    module.add_arguments(parser)
    add_common_arguments(parser)
    return parser


def _overview() -> Parser:
    from paceline.version import __version__

    verbs = "\n".join(f"  {verb:<11}{purpose}" for verb, purpose in VERBS.items())
    parser = Parser(
        prog="paceline", usage="paceline VERB [SPEC] [options]",
        description="Plan, price, prove and run the training of PyTorch models on however many devices there are.\n\n"
        f"verbs (paceline VERB --help):\n{verbs}",
        epilog=epilog("paceline plan examples/stdlib-code.toml --explain", EXIT_CODES),
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    return parser


def _tell(fields: dict[str, object], message: str, as_json: bool, word: str = "error") -> int:
    """Write the ending for people on stderr and, where asked for, for machines on stdout; return its exit code."""
    code = fields["exit_code"]
    assert isinstance(code, int)
    try:
        if as_json:
            print(json.dumps({"format": FORMAT, **fields}, indent=2), flush=True)
        print_error(message, word)
    except BrokenPipeError:
        _mute_stdout()
    return code


def _mute_stdout() -> None:
    """Send the rest of stdout nowhere: its reader left (`paceline plan | head`); the flush at exit must not fail."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a file behind it needs no muting
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Lead standard streams nowhere that were closed before this process began (`>&-`).

    The next files to be opened would have their numbers, and what libraries print would be written there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _tolerate_any_character() -> None:
    """Write what the terminal's encoding lacks as an escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _defect(error: Exception, words: list[str], as_json: bool) -> int:
    """Show an error that nobody foresaw: of the user's own code with its place, else with all that a report needs."""
    from paceline.version import __version__

    trace = "".join(traceback.format_exception(error))
    because = f"{type(error).__name__}: {error}"
    what, fix = "a defect of Paceline", "please report it with the lines above: they hold all that is needed"
    if own := own_place(error):
        what, fix = f"your own code failed at {own}", "mend it there: the lines above lead to it"
    place = f"paceline {__version__}, Python {platform.python_version()}, {platform.platform()}"
    print(f"{trace}\n{place}\npaceline {shlex.join(words)}", file=sys.stderr)
    fields: dict[str, object] = {"error": "OwnCode" if own else "Defect", "what": what, "because": because, "try": fix,
                                 "exit_code": 1, "traceback": trace}  # fmt: skip
    return _tell(fields, f"{what}\n  because  {because}\n  try      {fix}", as_json)
