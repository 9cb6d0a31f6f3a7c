"""Writes the reference pages that the code itself states: docs/reference/cli.md, spec.md, resume.md and exit-codes.md.

`python docs/scripts/write_reference.py` writes them; a test compares them with what the code says now.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.json.shapes import ALWAYS, BARE, ERROR, SHAPES
from paceline.cli.main import VERBS
from paceline.cli.parser import EXIT_CODES, Parser, add_common_arguments
from paceline.config.shape import Option, ShapedTable
from paceline.config.values import UNSET, literal, plain
from paceline.spec.load import table
from paceline.spec.survive.contract import CLAUSES

REFERENCE = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by docs/scripts/write_reference.py from the code; edit the code instead. -->"

CLI_HEAD = """
Every verb takes `--help`, which imports no torch, and `--json`, which writes one JSON object to standard output, also
for errors; messages for people then go to standard error. Options are not abbreviated. An error says what happened,
because of what, and what to try. Colour is used on a terminal only, and not where `NO_COLOR` is set.
"""

JSON_HEAD = """
With `--json` every action writes one object to standard output, and an action that fails the object of its error; texts
for people go to standard error. Numbers that are not known are null. Within one `format` keys are added and never taken
away, so a reader passes over those that it does not know. A test holds every object against this page.
"""

EXIT_HEAD = """
Schedulers and scripts can act on how a command ended. With `--json` the same number stands in the object's `exit_code`.
"""

EXIT_TAIL = """
**75 is the one to act on.** `paceline train` ends with it after SIGTERM, SIGINT, SIGUSR1 or SIGHUP, and at
`run.time_limit`: the ranks have agreed on the step, a checkpoint is saved, and the same command goes on from there.
Under `nohup` SIGHUP, a terminal that is closed, stops nothing. 74 and 75 are EX_IOERR and EX_TEMPFAIL of `sysexits.h`.

Once it has read its spec, SIGTERM, SIGUSR1 and SIGHUP end it with 75 at every moment: before the ranks begin nothing is
saved, and it says so; after the last step the report is written and the command ends with 0. Ctrl-C before the ranks
begin ends with 130, as in any program. Other commands end with 143 after SIGTERM. The temporary folders of all of
them are removed; those of a command that was killed (SIGKILL) are removed by the next one that needs such a folder,
ten minutes later at the earliest.

<!-- not run: needs Slurm -->
```bash
#SBATCH --signal=USR1@120
srun paceline train spec.toml
if [ $? -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
```

`srun` is needed: that signal goes to what `srun` started, and at the limit itself Slurm ends the script. `srun` ends
with the highest code of its tasks, so with 137 where one was killed and the run went on
([a script that heeds it](../guide/training.md#stopping-and-going-on)).
"""

SPEC_HEAD = """
A spec file is TOML with four tables: `[task]`, `[cluster]`, `[plan]` and `[run]`. Every option has a default. On the
command line, `--set KEY=VALUE` replaces one value: `--set task.optimizer.lr=1e-3`.
[Spec files](../guide/spec-files.md) tells how they are read.
"""

RESUME_HEAD = """
A run that is started again goes on from its newest sound checkpoint. The machines may change, and so may the plan; the
experiment may not. This is the whole contract: for each option of a [spec](spec.md) whether its change is

- **free**: nothing is said of it,
- **notice**: the run goes on, and the change is a decision in the [journal](journal.md),
- **refused**: nothing is trained, the error names the option, and the exit code is 2.

A row for a table holds for its options that have none of their own. The content of the data is compared by its
fingerprint, wherever they are now. A learning rate that would take another course though nothing in the spec says so
ends the resume with exit code 4. Another version of Paceline, torch, Python, numpy or transformers than the
checkpoint's is a notice, and so is a module that the task names (`my_loss:objective`) whose file has changed; what such
a module imports is not looked at.
"""

RESUME_TAIL = """
What a checkpoint holds for this is told in [checkpoints](checkpoint.md). Where the journal has the step that comes
next, that step is held against it: see [training](../guide/training.md#stopping-and-going-on).
"""

UNITS = {
    "bytes": (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("MB", 10**6), ("kB", 10**3)),
    "duration": (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)),
}
KIND_TEXT = {
    "text": "text", "texts": "list of texts", "whole": "whole number", "number": "number", "flag": "true or false",
    "amount": "amount", "duration": 'duration, "2 h"', "bytes": 'size, "24 GiB"', "free": "table of your own",
    "tables": "list of tables",
}  # fmt: skip


def pages() -> dict[str, str]:
    """Return file name to content of every page that is written from the code."""
    return {
        "cli.md": cli_page(), "spec.md": spec_page(), "resume.md": resume_page(), "exit-codes.md": exit_codes_page(),
        "json.md": json_page(),
    }  # fmt: skip


def cli_page() -> str:
    """Return the reference of the verbs and their options."""
    lines = [NOTE, "", "# Command line", *CLI_HEAD.split("\n")]
    lines += ["| verb | what it does |", "|---|---|"]
    lines += [f"| [`{verb}`](#paceline-{verb}) | {purpose} |" for verb, purpose in VERBS.items()]
    for verb in VERBS:
        lines += ["", *verb_lines(verb)]
    return "\n".join(lines) + "\n"


def verb_lines(verb: str) -> Iterator[str]:
    """Yield the section of one verb."""
    module = importlib.import_module(f"paceline.cli.{verb}")
    parser = Parser(prog=f"paceline {verb}", add_help=False)
    module.add_arguments(parser)
    add_common_arguments(parser)
    yield from (f"## `paceline {verb}`", "", *(module.__doc__ or "").strip().split("\n"), "")
    yield from ("| argument | meaning |", "|---|---|")
    for action in parser._actions:  # argparse offers no public way to read a parser's arguments
        yield f"| `{_argument(action)}` | {cell(action.help or '')} |"
    example = "\n".join(f"$ {line}" for line in module.EXAMPLE.split("\n"))
    needs = getattr(module, "EXAMPLE_NEEDS", "")  # why the examples are not run with the page
    yield from ("", *([f"<!-- not run: {needs} -->"] if needs else []), "```console", example, "```", "")
    codes = ", ".join(f"{code} {EXIT_CODES[code].partition(':')[0]}" for code in sorted({0, *module.CODES}))
    yield f"Ends with: {codes}; [any verb](exit-codes.md) may end with 1, 2 or 130."


def _argument(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest) if action.required else f"[{action.metavar or action.dest}]"
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    takes = action.metavar or choices if action.nargs != 0 else ""
    return " ".join(filter(None, [", ".join(action.option_strings), str(takes)]))


def exit_codes_page() -> str:
    """Return the reference of exit codes."""
    rows = [f"| {code} | {meaning} |" for code, meaning in sorted(EXIT_CODES.items())]
    return "\n".join([NOTE, "", "# Exit codes", EXIT_HEAD, "| code | meaning |", "|---:|---|", *rows, EXIT_TAIL])


def json_page() -> str:
    """Return the reference of what `--json` writes."""
    lines = [NOTE, "", "# JSON", *JSON_HEAD.split("\n"), "| key | always there |", "|---|---|"]
    lines += [f"| `{key}` | {cell(meaning)} |" for key, meaning in ALWAYS.items()]
    for shape, keys in SHAPES.items():
        title = shape[0].upper() + shape[1:] if shape == ERROR else f"`{shape}`"
        lines += ["", f"## {title}", "", "| key | holds |", "|---|---|"]
        for key, meaning in keys.items():
            name = "and more" if key == "..." else f"`{key.rstrip('?')}`"
            some = " (where there are any)" if key.endswith("?") else ""
            lines.append(f"| {name} | {cell(meaning)}{some} |")
    lines += ["", "## Documents of another form", ""]
    lines += [f"- `{action} --json`: {cell(what)}." for action, what in BARE.items()]
    return "\n".join(lines) + "\n"


def resume_page() -> str:
    """Return the reference of what may change between two starts of a run."""
    rows = [f"| `{clause.of}` | {clause.on_resume} | {cell(clause.because)} |" for clause in CLAUSES]
    head = ["| option or table | its change is | because |", "|---|---|---|"]
    return "\n".join([NOTE, "", "# Resume contract", RESUME_HEAD, *head, *rows, RESUME_TAIL])


def spec_page() -> str:
    """Return the reference of all options of spec files."""
    lines = [NOTE, "", "# Spec options", *SPEC_HEAD.split("\n")]
    for name, member in table().members.items():
        assert isinstance(member, ShapedTable)
        lines += _table_lines(name, member)
    return "\n".join(lines).rstrip() + "\n"


def _table_lines(key: str, spec: ShapedTable) -> Iterator[str]:
    yield from (f"## `[{key}]`", "", f"{spec.doc[0].upper()}{spec.doc[1:].rstrip('.')}.", "")
    if spec.shorthand:
        parent, _, name = key.rpartition(".")
        yield from (f'In a file, `{name} = "x"` in `[{parent}]` is short for `{key}.{spec.shorthand} = "x"`.', "")
    yield from ("| option | takes | default | meaning |", "|---|---|---|---|")
    for option in spec.members.values():
        if isinstance(option, Option):
            yield f"| `{option.name}` | {cell(takes(option))} | {cell(default(option))} | {cell(option.doc)} |"
    yield ""
    for name, member in spec.members.items():
        if isinstance(member, ShapedTable):
            yield from _table_lines(f"{key}.{name}", member)
        elif member.item is not None:
            yield from _table_lines(f"[{key.strip('[]')}.{name}]", member.item)


def takes(option: Option) -> str:
    """Return what values an option takes, in words."""
    text = KIND_TEXT[option.kind]
    if option.choices:
        text = ", ".join(f"`{choice}`" for choice in option.choices)
    if option.kind == "amount":
        text = f"amount in {', '.join(option.units)}"
    bounds = []
    if option.above is not None:
        bounds.append(f"above {option.above:g}")
    if option.minimum is not None:
        bounds.append(f"at least {option.minimum:g}")
    if option.maximum is not None:
        bounds.append(f"at most {option.maximum:g}")
    bounds += [f'or "{word}"' for word in option.words]
    if option.optional:
        bounds.append(f'or "{UNSET}"')
    return ", ".join([text, *bounds])


def default(option: Option) -> str:
    """Return an option's default as TOML; sizes and durations in the largest unit of which they are a whole number."""
    if option.default is None:
        return "unset"
    for unit, one in UNITS.get(option.kind, ()):
        if option.default and option.default % one == 0:
            return f'`"{option.default / one:.0f} {unit}"`'
    return f"`{literal(plain(option, option.default))}`"


def cell(text: str) -> str:
    """Return the text fit for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    """Write the pages."""
    for name, content in pages().items():
        (REFERENCE / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
