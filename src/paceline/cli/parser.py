"""The argument parser: argparse, with errors that say what, because and try, and nothing abbreviated."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from paceline.config.other_words import choice_meant, command_option_meant, said_elsewhere
from paceline.errors import ConfigError

EXIT_CODES = {
    0: "done",
    1: "a defect of Paceline: the traceback is shown, please report it",
    2: "usage or configuration: an option, a spec file or a value is wrong",
    3: "does not fit: no layout of the task fits the cluster, or the one asked for does not; or a run is out of memory",
    4: "verification failed: a layout does not compute the numbers of one device",
    5: "data: they cannot be read, or do not make a single sample",
    6: "numerical stop: the loss or the gradient norm is no longer finite",
    74: "storage: a checkpoint, journal or report cannot be written or read, or another run holds the directory",
    75: "requeue me: stopped early, a checkpoint is saved, start the same command again",
    130: "interrupted (Ctrl-C); in general 128 + n where signal n ended it",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage and leaving."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)
        self._words: Sequence[str] = ()

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises ConfigError for what argparse refuses and for anything left over."""
        self._words = words
        try:
            options, extra = self.parse_known_args(words)
        except argparse.ArgumentError as error:  # what argparse itself does not turn into error()
            self.error(str(error))
        if extra:
            self._refuse(extra[0])
        return options

    def error(self, message: str) -> NoReturn:
        """Raise what argparse complains of as a ConfigError."""
        missing = re.fullmatch(r"the following arguments are required: (.*)", message)
        if missing:
            for word in self._words:  # it may well be there, behind an option that there is not
                if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions and word != "--":
                    self._refuse(word)
            raise ConfigError(f"{missing.group(1)} is missing", f"{self.prog} needs it", f"{self.prog} --help")
        about = re.fullmatch(r"argument (\S+?)(?:/\S+)?: (.*)", message, re.DOTALL)
        if about:
            self._refuse_value(about.group(1), about.group(2))
        raise ConfigError(message, f"`{self.prog}` cannot read it", f"{self.prog} --help")

    def _refuse_value(self, name: str, complaint: str) -> NoReturn:
        written_alone = {str(each.metavar or each.dest): each for each in self._actions if not each.option_strings}
        action = self._option_string_actions.get(name) or written_alone.get(name)
        choice = re.match(r"invalid choice: '(.*)' \(", complaint)
        if action and action.choices and choice:
            known = [str(known) for known in action.choices]
            because = f"it takes one of: {', '.join(known)}"
            raise ConfigError(
                f"{name} = '{choice.group(1)}' is not a choice", because, choice_meant(choice.group(1), known)
            )
        because = (
            f"{name} takes {action.metavar or 'no value'}: {action.help}" if action else "it is not what is expected"
        )
        raise ConfigError(f"{name}: {complaint}", because, f"{self.prog} --help")

    def _refuse(self, word: str) -> NoReturn:
        if word.startswith("-") and word != "-":
            known = [name for name in self._option_string_actions if name.startswith("--")]
            name = word.partition("=")[0]
            longer = [option for option in known if len(name) > 3 and option.startswith(name)]  # none is abbreviated
            said = said_elsewhere(name) if "--set" in known else None
            written_alone = [str(each.metavar or each.dest) for each in self._actions if not each.option_strings]
            near = command_option_meant(name, known, written_alone)
            fix = f"did you mean '{longer[0]}'?" if longer else near or f"one of: {', '.join(known)}"
            if said and not longer and (near is None or "=" in said):
                fix = f"in the spec, or by --set: {said}" if "=" in said else said
            raise ConfigError(f"unknown option '{name}'", f"`{self.prog}` has no such option", fix)
        because = f"`{self.prog}` takes no further argument"
        raise ConfigError(f"unexpected argument '{word}'", because, f"{self.prog} --help; quote values with spaces")


def whole(text: str) -> int:
    """Return a whole number of at least 1, the type of an option such as --steps."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return value


def step_or_best(text: str) -> int | str:
    """Return the number of a step, or "best", the type of an option --step."""
    return text if text == "best" else whole(text)


def number(text: str) -> int:
    """Return a whole number from 0 on, the type of an option such as --node."""
    return 0 if text == "0" else whole(text)


def share(text: str) -> float:
    """Return a number above 0 and at most 1, the type of an option such as --share."""
    found = positive(text)
    if found > 1:
        raise argparse.ArgumentTypeError(f"'{text}' is more than 1, which is all")
    return found


def positive(text: str) -> float:
    """Return a finite number above 0, the type of an option such as --days."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def epilog(example: str, codes: Iterable[int]) -> str:
    """Return the end of a verb's help: an example and the exit codes that the verb can end with."""
    lines = [f"  {code:>3}  {EXIT_CODES[code]}" for code in sorted({0, 1, 2, 130, *codes})]
    return "\n".join(["example:", *(f"  {line}" for line in example.split("\n")), "", "exit codes:", *lines])


def add_spec_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add SPEC and --set, which every verb that works on a task takes."""
    parser.add_argument(
        "spec", metavar="SPEC", nargs=None if required else "?", default=None,
        help="a spec file in TOML" + ("" if required else "; without one, the defaults and --set make the spec"),
    )  # fmt: skip
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="replace one value of the spec, such as task.optimizer.lr=1e-3 (repeatable)",
    )  # fmt: skip


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every verb."""
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object to stdout, also for errors; messages go to stderr"
    )
