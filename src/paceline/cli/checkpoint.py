"""Looks at checkpoints, checks, compares and converts them.

    ls RUN_DIR          the checkpoints of a run, newest first, and why others are passed over
    show PATH           what one holds: progress, plan, versions, bytes; every tensor with --tensors
    verify PATH         reads every byte, and holds every tensor's values against their fingerprint; ends with 74 where
                        one is damaged
    diff PATH PATH      tensors and options in which two differ, whatever their layouts; ends with 4 with --equal
    convert PATH OUT    writes another format: --to weights (safetensors, in Hugging Face's names where the model is
                        built in), --to distributed (torch's distributed checkpoint), --to safetensors (from torch's)

PATH is a checkpoint's folder, or a run's directory: its newest sound one then, or the one of --step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import CHECK, COMPARE, CONVERT, LIST, SHOW
from paceline.cli.output import print_json, say_folded
from paceline.cli.parser import whole
from paceline.errors import ConfigError, StorageError
from paceline.said import folded
from paceline.session.verbs import checkpoints
from paceline.units import format_bytes, plural

if TYPE_CHECKING:
    from paceline.checkpoint.inspect.sound import Soundness

EXAMPLE = "paceline checkpoint ls runs/stdlib-code\npaceline checkpoint verify runs/stdlib-code"
CODES = (4, 74)
ACTIONS = {"ls": 1, "show": 1, "verify": 1, "diff": 2, "convert": 2}  # how many paths each takes
SHOWN = 12  # tensors that `diff` tells one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline checkpoint`."""
    parser.add_argument("action", metavar="ACTION", choices=tuple(ACTIONS), help=f"what to do: {', '.join(ACTIONS)}")
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="checkpoints, or runs' directories")
    parser.add_argument("--step", metavar="N", type=whole, help="the checkpoint of this step instead of the newest")
    parser.add_argument("--tensors", action="store_true", help="show: every tensor with its dtype and shape")
    parser.add_argument("--prefix", default="", help="diff, and convert --to safetensors: tensors "
                        "whose names begin so, such as 'model.'")  # fmt: skip
    parser.add_argument("--equal", action="store_true", help="diff: end with 4 where tensors differ")
    parser.add_argument("--to", choices=checkpoints.FORMATS, default="weights", help="convert: the format to write")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline checkpoint`."""
    wanted = ACTIONS[options.action]
    if len(options.paths) != wanted:
        raise ConfigError(
            f"checkpoint {options.action} with {len(options.paths)} paths", f"it takes {wanted}",
            "paceline checkpoint --help",
        )  # fmt: skip
    return {"ls": _ls, "show": _show, "verify": _verify, "diff": _diff, "convert": _convert}[options.action](options)


def _ls(options: argparse.Namespace) -> int:
    listed, skipped = checkpoints.list_at(options.paths[0])
    if options.json:
        print_json({"checkpoints": listed, "skipped": skipped}, LIST)
        return 0
    for one in listed:
        print(
            f"{one.path.name:<18} step {one.step:>8,}  {format_bytes(one.bytes):>10}  {one.created}  "
            f"{plural(one.ranks, 'rank')}  {one.layout}"
        )
    for reason in skipped:
        say_folded(f"skipped  {reason}")
    return 0


def _show(options: argparse.Namespace) -> int:
    found = checkpoints.show(checkpoints.checkpoint_at(options.paths[0], options.step))
    if options.json:
        print_json(found, SHOW)
        return 0
    one = found.listed
    print(f"path       {one.path}")
    say_folded(
        f"progress   step {one.step:,} · {found.position:,} samples · saved {one.created} as number {one.sequence}"
    )
    say_folded(f"task       {found.task} · data {found.fingerprint}")
    say_folded(f"plan       {found.plan}")
    say_folded(f"versions   {', '.join(f'{name} {version}' for name, version in found.versions.items())}")
    parts = " · ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes_of.items())
    say_folded(f"holds      {len(found.tensors):,} tensors · {parts} · {format_bytes(one.bytes)} on disk")
    if options.tensors:
        for name, kind in found.tensors.items():
            print(f"  {name}  {kind}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = checkpoints.check(options.paths[0], options.step)
    code = StorageError.exit_code if any(isinstance(each, StorageError) for _, each in found) else 0
    if options.json:
        print_json({"checkpoints": [_as_json(path, each) for path, each in found]}, CHECK, code)
    else:
        for path, each in found:
            if isinstance(each, StorageError):
                say_folded(f"damaged  {path.name}: {each.what}: {each.because}")
                continue
            also = f", {len(each.unchecked)} have no fingerprint" if each.unchecked else ""
            size = format_bytes(each.manifest.total_bytes)
            say_folded(f"sound    {path.name}: {size}, values of {each.tensors - len(each.unchecked)} tensors{also}")
    return code


def _as_json(path: Path, found: Soundness | StorageError) -> dict[str, object]:
    if isinstance(found, StorageError):
        return {"path": path, "sound": False, "because": f"{found.what}: {found.because}"}
    return {"path": path, "sound": True, "tensors": found.tensors, "unchecked": found.unchecked}


def _diff(options: argparse.Namespace) -> int:
    first, second = (checkpoints.checkpoint_at(path, options.step) for path in options.paths)
    found = checkpoints.compare(first, second, options.prefix)
    tensors = found.tensors
    code = 4 if options.equal and not tensors.is_none else 0
    if options.json:
        print_json(found, COMPARE, code)
    else:
        print(f"first    {first}\nsecond   {second}")
        for option in found.options:
            say_folded(f"option   {option}")
        for name in tensors.only_first[:SHOWN]:
            print(f"only in first   {name}")
        for name in tensors.only_second[:SHOWN]:
            print(f"only in second  {name}")
        for change in tensors.changed[:SHOWN]:
            far = f"{change.relative:.1e} apart" if change.relative is not None else change.why
            say_folded(f"differs  {change.name}  {far}")
        told = min(SHOWN, len(tensors.changed))
        more = f", {len(tensors.changed) - told} more not shown" if len(tensors.changed) > told else ""
        alone = f"{len(tensors.only_first)} only in the first, {len(tensors.only_second)} only in the second"
        say_folded(f"tensors  {tensors.same} the same, {len(tensors.changed)} differ{more}, {alone}")
    return code


def _convert(options: argparse.Namespace) -> int:
    source, out = options.paths
    found = checkpoints.convert(source, out, options.to, options.step, options.prefix)
    if found.warning:
        print(folded(f"warning: {found.warning}", sys.stderr), file=sys.stderr)
    if options.json:
        print_json(found, CONVERT)
        return 0
    size = sum(file.stat().st_size for file in found.files)
    say_folded(f"convert  {found.source} to {found.out} ({plural(len(found.files), 'file')}, {size:,} bytes)")
    for name in found.left_out:
        print(f"left out {name}")
    return 0
