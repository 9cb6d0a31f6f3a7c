"""Proves that a layout computes the same numbers as one device: loss, gradients, gradient norm, updated weights.

Runs both in small real processes on this machine, and names the first tensor that differs.
"""

from __future__ import annotations

import argparse
from typing import Any

from paceline.cli.output import print_json, say_to
from paceline.cli.parser import add_spec_arguments, whole
from paceline.errors import ConfigError, suggestion

EXAMPLE = "paceline verify examples/stdlib-code.toml --layout dp_shard=2 --steps 5"
CODES = (3, 4, 5, 6)
DTYPES = ("fp32", "fp64")  # the tolerances of coarser ones would hide mistakes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline verify`."""
    add_spec_arguments(parser)
    parser.add_argument(
        "--layout", metavar="AXIS=N,...", help="the layout to prove, such as dp_shard=2; without it, the planner's"
    )
    parser.add_argument("--steps", metavar="N", type=whole, default=3, help="optimizer updates to compare (default 3)")
    dtypes_help = f"precisions to compare in, of {','.join(DTYPES)} (default fp32,fp64)"
    parser.add_argument("--dtypes", metavar="LIST", default="fp32,fp64", help=dtypes_help)


def execute(options: argparse.Namespace) -> int:
    """Run `paceline verify`: 0 where the layout equals one device, 4 where it does not, 3 where it cannot be had."""
    from paceline.spec import load_spec

    dtypes = tuple(part.strip() for part in options.dtypes.split(","))
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtypes: unknown precision '{dtype}'", "a list with commas", suggestion(dtype, DTYPES))
    spec = load_spec(options.spec, options.overrides)
    from paceline.verify.start import failure_of, verify_spec, verify_text

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
