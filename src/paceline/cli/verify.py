"""Proves that a layout computes the same numbers as one device: loss, gradients, gradient norm, updated weights.

Runs both in small real processes on this machine, and names the first tensor that differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import VERIFY
from paceline.cli.output import print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments, whole
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.session.verbs.proofs import Verification

EXAMPLE = "paceline verify examples/stdlib-code.toml --layout dp_shard=2"
CODES = (3, 4, 5, 6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline verify`."""
    add_spec_arguments(parser)
    parser.add_argument(
        "--layout", metavar="AXIS=N,...", help="the layout to prove, such as dp_shard=2; without it, the planner's"
    )
    parser.add_argument(
        "--all", metavar="N", type=whole, default=0, dest="largest", help="every layout of 2 to N ranks, each in fp64"
    )
    parser.add_argument("--steps", metavar="N", type=whole, default=3, help="optimizer updates to compare (default 3)")
    dtype_help = "precisions to compare in, of fp32,fp64 (default fp32,fp64; with --all fp64)"
    parser.add_argument("--dtype", metavar="LIST", default=None, help=dtype_help)


def execute(options: argparse.Namespace) -> int:
    """Run `paceline verify`: 0 where the layout equals one device, 4 where it does not, 3 where it cannot be had."""
    from paceline.session.verbs.proofs import verification
    from paceline.spec.load import load_spec

    dtypes = _dtypes(options)
    if options.largest and options.layout:
        raise ConfigError("--all and --layout exclude each other", "--all proves every layout", "one of the two")
    spec = load_spec(options.spec, options.overrides)
    say = say_to(options.json)
    watched = (sys.stderr if options.json else sys.stdout).isatty()
    found = verification(
        spec, layout=options.layout, every=options.largest, steps=options.steps, dtypes=dtypes, say=say,
        progress=say if watched else None,
    )  # fmt: skip
    if options.json:
        print_json(found, VERIFY)
        return found.exit_code
    for line in _every_line(found) if options.largest else _lines(found):
        say(line)
    failure = found.failure(options.spec or "SPEC")
    if failure is not None:
        raise failure
    return found.exit_code


def _dtypes(options: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the precisions that were named, each once; None where none were."""
    from paceline.session.verbs.proofs import precisions_of

    return None if options.dtype is None else precisions_of(options.dtype.split(","))


def _lines(found: Verification) -> list[str]:
    """Return the proof of each layout in a line."""
    from paceline.verify.process.start import verify_text

    told = [(proof.layout, proof.refused_because, proof) for proof in found.layouts]
    return [f"verify   {name}: {f'refused, {because}' if because else verify_text(proof)}"
            for name, because, proof in told]  # fmt: skip


def _every_line(found: Verification) -> list[str]:
    """Return the table of many layouts, then what was refused and what failed."""
    from paceline.verify.process.every import table_rows

    refused = [f"refused  {proof.layout}: {proof.refused_because}" for proof in found.refused]
    failed = [f"failed   {proof.layout}: {proof.error}" for proof in found.unequal if proof.error]
    return [*table_lines(table_rows(found.layouts)), *refused, *failed]
