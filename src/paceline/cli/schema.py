"""Prints the JSON schema of spec files, for completion and checks in an editor.

With the Even Better TOML extension or taplo: save it, and put `#:schema ./paceline.schema.json` in the first line.
"""

from __future__ import annotations

import argparse

from paceline.cli.output import print_bare

EXAMPLE = "paceline schema > paceline.schema.json"
CODES = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the schema has no options."""


def execute(options: argparse.Namespace) -> int:
    """Run `paceline schema`."""
    from paceline.spec.load import spec_schema

    print_bare(spec_schema())
    return 0
