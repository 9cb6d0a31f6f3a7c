"""Prepares data ahead of training, and looks at what they hold.

    prepare SOURCE OUT    tokenises documents into token shards in a folder or a URL, in parallel; a run reads them with
                          `task.data.source = "OUT"`. Started again after an interruption, it goes on where it stopped
    score RUN SOURCE OUT  writes each document with its score by a run's model, as JSONL: its loss, its uncertainty or
                          its place in a core set; `task.data.score_min` and `score_max` then select by it
    copies SOURCE OUT     writes each document with the share of its text that stands in an earlier one, as JSONL;
                          `task.data.score_max = 0.8` then leaves near copies out
    inspect SOURCE        documents, tokens, lengths, duplicates, how well documents fill samples, and some texts; of
                          images their classes and sizes, which cannot be decoded, and which are there twice

SOURCE is what `task.data.source` may be (a file, a folder, a URL, a data set of Hugging Face), or a spec file, whose
data are meant. The other options of the data are given by --set, such as --set task.data.tokenizer=bpe.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import COPIES, INSPECT, INSPECT_IMAGES, PREPARE, SCORE
from paceline.cli.output import print_json, say_to, table_lines
from paceline.cli.parser import number, share, whole
from paceline.cli.terminal.bar import Bar
from paceline.errors import ConfigError
from paceline.plan.explain.lines import wrap
from paceline.units import plural

if TYPE_CHECKING:
    from paceline.spec.task import DataSpec
    from paceline.task.data.prepare.inspect import Inspected
    from paceline.task.data.prepare.inspect_images import InspectedImages

EXAMPLE = "paceline data prepare examples ready --workers 2\npaceline data inspect ready"
CODES = (5, 74)
MOST_CLASSES = 20  # shown
ACTIONS = {"prepare": 2, "inspect": 1, "score": 3, "copies": 2}  # how many paths each takes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline data`."""
    parser.add_argument("action", metavar="ACTION", choices=tuple(ACTIONS), help=f"what to do: {', '.join(ACTIONS)}")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="SOURCE; but for inspect OUT too, what is written")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="one option of the data, such as task.data.text_field=body (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", metavar="N", type=whole, default=0, help="prepare: processes that tokenise (default: one per core)"
    )
    parser.add_argument("--dedup", action="store_true", help="prepare: keep the first of documents with equal text")
    parser.add_argument("--append", action="store_true", help="prepare: add shards to a folder that has some")
    parser.add_argument(
        "--by", choices=("loss", "uncertainty", "core"), default="loss",
        help="score: mean next-token loss, or mean entropy of what the model expects, in nats; or the place in a core"
        " set, the documents that lie closest to all others by the model's hidden states (default loss)",
    )  # fmt: skip
    parser.add_argument(
        "--share", metavar="PART", type=share, default=0.1,
        help="score --by core: part of the documents in the core set; all others have the score 1 (default 0.1)",
    )  # fmt: skip
    parser.add_argument("--samples", metavar="N", type=number, default=3, help="inspect: texts to show (default 3)")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline data`."""
    wanted = ACTIONS[options.action]
    if len(options.paths) != wanted:
        raise ConfigError(
            f"data {options.action} with {len(options.paths)} paths", f"it takes {wanted}", "paceline data --help"
        )
    return {"prepare": _prepare, "inspect": _inspect, "score": _score, "copies": _copies}[options.action](options)


def _data_of(options: argparse.Namespace) -> DataSpec:
    """Return the data that the command line names. Raises ConfigError where a spec file has none of its own."""
    from paceline.spec.load import load_spec
    from paceline.spec.task import DataSpec
    from paceline.task.settled import settle

    source = options.paths[1 if options.action == "score" else 0]
    if source.endswith(".toml"):
        spec = load_spec(source, options.overrides)
    else:
        spec = load_spec(None, [f"task.data.source={source}", *options.overrides])
    data = settle(spec, say_to(options.json)).spec.task.data if options.action == "inspect" else spec.task.data
    if not isinstance(data, DataSpec):
        raise ConfigError(f"the data of {source} are no text", "they are given as an object", "name a file or a folder")
    if data.mix:  # task.data.source is none of its sources, and would be read in their place
        parts = ", ".join(each.source for each in data.mix)
        raise ConfigError(
            f"data {options.action} of {source}, whose data are a mixture", f"one source is read, and it has {parts}",
            "one of them in the place of the spec file; a mixture may be of prepared folders",
        )  # fmt: skip
    return data


def _prepare(options: argparse.Namespace) -> int:
    import os

    from paceline.task.data.prepare.prepare import prepare
    from paceline.task.data.prepare.remote_out import prepare_remote
    from paceline.task.data.storage.remote import is_remote

    workers, data, out = options.workers or len(os.sched_getaffinity(0)), _data_of(options), options.paths[1]
    chosen = {"workers": workers, "dedup": options.dedup, "append": options.append}
    with Bar(sys.stderr) as bar:
        if is_remote(out):
            done = prepare_remote(data, out, bar.show, **chosen)
        else:
            done = prepare(data, Path(out), progress=bar.show, **chosen)
    card = done.index.card
    if options.json:
        print_json(
            {"folder": str(done.folder), "made": done.made, "fingerprint": done.index.fingerprint, "card": card},
            PREPARE,
        )
        return 0
    if not done.made:
        print(f"prepared {done.folder} was there already, from the same data and by the same options")
    tokens = done.index.tokens("train") + done.index.tokens("validation")
    shards = sum(map(len, done.index.splits.values()))
    of_all = f"{plural(card['documents'], 'document')}, {plural(tokens, 'token')} in {plural(shards, 'shard')}"
    print(f"prepared {done.folder}: {of_all}")
    for split in done.index.splits:
        documents = plural(done.index.documents(split), "document")
        print(f"  {split:<12}{documents}, {plural(done.index.tokens(split), 'token')}")
    if card["duplicates_removed"]:
        print(f"  left out, as they are like earlier ones: {plural(card['duplicates_removed'], 'document')}")
    _tell_left_out(card["left_out"], card["left_out_first"])
    print(f'  read by      task.data.source = "{done.folder}" · fingerprint {done.index.fingerprint}')
    return 0


def _tell_left_out(count: int, first: str) -> None:
    if count:
        print(f"  left out: {plural(count, 'damaged document')}, the first: {first}")


def _score(options: argparse.Namespace) -> int:
    from paceline.session.verbs.scoring import score_documents

    with Bar(sys.stderr) as bar:
        done = score_documents(
            Path(options.paths[0]), _data_of(options), Path(options.paths[2]), options.by, bar.show, options.share
        )
    if options.json:
        print_json(done, SCORE)
        return 0
    scored = plural(done.documents, "document")
    print(f"scored   {scored} by {done.by} with step {done.step:,} of {options.paths[0]}: {done.out}")
    _tell_left_out(done.left_out, done.left_out_first)
    if done.core is not None:
        print(
            f"  core set     {plural(done.core.documents, 'document')} · every other one is within"
            f" {done.core.radius:.4g} of one of them, and within {done.core.radius_of_one:.4g} of the most central one"
        )
        print(f'  read it by   task.data.source = "{done.out}" · task.data.score_max = 1.0')
        return 0
    print("  scores       " + " · ".join(f"{name} {value:.4g}" for name, value in done.quantiles.items()))
    half = f"{done.quantiles['median']:.4g}"
    print(f'  read half by task.data.source = "{done.out}" · task.data.score_max = {half}')
    return 0


def _copies(options: argparse.Namespace) -> int:
    from paceline.task.data.prepare.copies import mark_copies

    with Bar(sys.stderr) as bar:
        done = mark_copies(_data_of(options), Path(options.paths[1]), bar.show)
    if options.json:
        print_json(done, COPIES)
        return 0
    print(
        f"compared {plural(done.documents, 'document')}: {done.near:,} share at least 0.8 with an earlier one, of which"
        f" {done.equal:,} seem equal to it: {done.out}"
    )
    _tell_left_out(done.left_out, done.left_out_first)
    print(f'  without them task.data.source = "{done.out}" · task.data.score_max = 0.8')
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from paceline.task.data.sources.named import kind_of_source

    data = _data_of(options)
    kind, path = kind_of_source(data.source)
    if kind == "images":
        from paceline.task.data.prepare.inspect_images import inspect_images

        of_images = inspect_images(data, path, options.samples)
        if options.json:
            print_json(of_images, INSPECT_IMAGES)
        else:
            _tell_images(of_images)
        return 0
    from paceline.task.data.prepare.inspect import inspect

    found = inspect(data, options.samples, say_to(options.json))
    if options.json:
        print_json(found, INSPECT)
        return 0
    _tell(found)
    return 0


def _tell_images(found: InspectedImages) -> None:
    print(f"data     {found.what} · squares of {found.image_size} pixels · fingerprint {found.fingerprint}")
    facts = list(found.splits.values())
    rows: list[tuple[str, ...]] = [("", *found.splits), ("images", *(f"{each.images:,}" for each in facts))]
    classes = sorted(facts[0].classes, key=lambda name: -sum(each.classes[name] for each in facts))
    for name in classes[:MOST_CLASSES]:
        rows.append((f"  {name}", *(f"{each.classes[name]:,}" for each in facts)))
    rows.append(("cannot be decoded", *(f"{each.damaged:,}" for each in facts)))
    rows.append(("equal images", *(f"{each.duplicates:.2%}" for each in facts)))
    for name in facts[0].shorter_sides:
        rows.append((f"shorter side, {name}", *(f"{each.shorter_sides.get(name, 0):,}" for each in facts)))
    for what in ("mean", "deviation"):
        rows.append((f"colours, {what}", *(" ".join(f"{one:.3f}" for one in getattr(each, what)) for each in facts)))
    print("\n".join(table_lines(rows)))
    if len(classes) > MOST_CLASSES:
        print(f"note     {len(classes) - MOST_CLASSES:,} more classes have fewer images each: --json has all")
    for told in found.told:
        print("\n".join(wrap("note     ", told)))
    for at, text in enumerate(found.samples, 1):
        print(f"image {at}  {text}")


def _tell(found: Inspected) -> None:
    print(f"data     {found.what} · tokenizer {found.tokenizer}, {found.vocab:,} ids · fingerprint {found.fingerprint}")
    rows: list[tuple[str, ...]] = [("", *found.splits)]
    facts = list(found.splits.values())
    rows.append(("documents", *(f"{each.documents:,}" for each in facts)))
    rows.append(("tokens", *(f"{each.tokens:,}" for each in facts)))
    rows.append((f"samples of {found.seq_len:,}", *(f"{each.samples:,}" for each in facts)))
    for name in facts[0].lengths:
        rows.append((f"document, {name}", *(f"{each.lengths.get(name, 0):,g}" for each in facts)))
    rows.append(("equal documents", *(f"{each.duplicates:.2%}" for each in facts)))
    rows.append(("documents cut", *(f"{each.cut:.2%}" for each in facts)))
    rows.append(("padding if padded", *(f"{each.padded:.2%}" for each in facts)))
    rows.append(("padding if packed", *(f"{each.packed:.2%}" for each in facts)))
    print("\n".join(table_lines(rows)))
    for told in found.told:
        print("\n".join(wrap("note     ", told)))
    for at, text in enumerate(found.samples, 1):
        print(f"row {at}    {text}" if "table" in found.card else f"text {at}   {text!r}")
