"""Proves that a layout computes the same numbers as one device: loss, gradients, gradient norm, updated weights.

Runs both in small real processes on this machine, and names the first tensor that differs.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from paceline.cli.output import print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments, whole
from paceline.errors import ConfigError, VerificationFailed, suggestion

if TYPE_CHECKING:
    from paceline.spec.load import Spec

EXAMPLE = "paceline verify examples/stdlib-code.toml --layout dp_shard=2 --steps 5"
CODES = (3, 4, 5, 6)
DTYPES = ("fp32", "fp64")  # the tolerances of coarser ones would hide mistakes
TORCH_NAMES = {"float32": "fp32", "float64": "fp64"}


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
    dtype_help = f"precisions to compare in, of {','.join(DTYPES)} (default fp32,fp64; with --all fp64)"
    parser.add_argument("--dtype", metavar="LIST", default=None, help=dtype_help)


def execute(options: argparse.Namespace) -> int:
    """Run `paceline verify`: 0 where the layout equals one device, 4 where it does not, 3 where it cannot be had."""
    from paceline.spec.load import load_spec

    dtypes = _dtypes(options)
    if options.largest and options.layout:
        raise ConfigError("--all and --layout exclude each other", "--all proves every layout", "one of the two")
    spec = load_spec(options.spec, options.overrides)
    if options.largest:
        return _every_layout(spec, options, dtypes)
    from paceline.verify.process.start import failure_of, verify_spec, verify_text

    say = say_to(options.json)
    result: dict[str, Any] = verify_spec(spec, layout=options.layout, steps=options.steps, dtypes=dtypes, say=say)
    refused = any(proof["refused_because"] for proof in result["layouts"])
    code = 0 if result["equal"] else 3 if refused else 4
    if options.json:
        print_json(result)
        return code
    for proof in result["layouts"]:
        because = proof["refused_because"]
        say(f"verify   {proof['layout']}: {f'refused, {because}' if because else verify_text(proof)}")
    for proof in result["layouts"]:
        if not proof["equal"] and not proof["refused_because"]:
            raise failure_of(proof)
    return code


def _dtypes(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the precisions to compare in, each once; torch's names of them are understood."""
    listed = ("fp64" if options.largest else "fp32,fp64") if options.dtype is None else options.dtype
    dtypes = tuple(dict.fromkeys(TORCH_NAMES.get(part.strip(), part.strip()) for part in listed.split(",")))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype: unknown precision '{dtype}'", "a list with commas", suggestion(dtype, DTYPES))
    return dtypes


def _every_layout(spec: Spec, options: argparse.Namespace, dtypes: tuple[str, ...]) -> int:
    """Prove every layout and print the table: 0 where all that can be had are equal, 4 where one is not."""
    from paceline.verify.process.every import table_rows, verify_all
    from paceline.verify.process.start import failure_of

    say = say_to(options.json)
    watched = (sys.stderr if options.json else sys.stdout).isatty()
    result = verify_all(
        spec, options.largest, steps=options.steps, dtypes=dtypes, say=say, progress=say if watched else None
    )
    refusals = [proof for proof in result["layouts"] if proof["refused_because"]]
    code = 0 if result["equal"] else 3 if len(refusals) == len(result["layouts"]) else 4
    if options.json:
        print_json(result)
        return code
    for line in table_lines(table_rows(result["layouts"])):
        say(line)
    for proof in refusals:
        say(f"refused  {proof['layout']}: {proof['refused_because']}")
    wrong = [proof for proof in result["layouts"] if not proof["equal"] and not proof["refused_because"]]
    for proof in wrong:
        if proof["error"]:
            say(f"failed   {proof['layout']}: {proof['error']}")
    differing = next((proof for proof in wrong if proof["first_difference"]), None)
    if differing:
        raise failure_of(differing)
    if wrong:
        name = wrong[0]["layout"]
        alone = f"paceline verify {options.spec} --layout {name.replace(' ', ',')}"
        raise VerificationFailed(f"layout {name} cannot be proven", str(wrong[0]["error"]), alone)
    return code
