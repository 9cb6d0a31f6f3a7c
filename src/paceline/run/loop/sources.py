"""The data of a run, opened together: one rank of a node lists and tokenises a text, the others map the token file.

Rank 0 comes first. Who knows its key needs to look at no file: only a node whose cache lacks that corpus reads the
documents once more, by the first of its ranks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.ranks import Ranks
from paceline.errors import ConfigError, DataError
from paceline.run.process.world import World
from paceline.spec.task import DataSpec, Task
from paceline.spec.watch.evaluate import HeldOutSetSpec
from paceline.task.data.protocol import Pair, Source
from paceline.task.data.rows.mixed import difference_of
from paceline.task.data.rows.one_tokenizer import tokens_differ
from paceline.task.data.source import arranged, corpus_sources, is_text, open_sources
from paceline.task.data.sources.cache import known_corpus, open_corpus
from paceline.task.data.sources.manifest import TOKENIZER, Corpus
from paceline.task.data.sources.named import kind_of_source
from paceline.task.data.sources.tokenizer import LEARNT

LONGEST_PAUSE_SECONDS = 5.0  # between two questions whether all are done: far from the time-out of a collective


def open_together(data: object, seed: int, world: World) -> Pair:
    """Return `open_sources` on every rank. Every rank calls it; what fails on one is raised on all.

    Raises DataError too where the data of a rank are not those of rank 0.
    """
    if world.size == 1:
        return open_sources(data, seed)
    if not isinstance(data, DataSpec):
        return _alike(open_sources(data, seed), False, world)
    pair = arranged(data, [_open_part(part, seed, world) for part in data.parts()])
    return _alike(pair, all(kind_of_source(part.source)[0] != "object" for part in data.parts()), world)


def _alike(pair: Pair, is_known: bool, world: World) -> Pair:
    """Return the sources. Raises DataError on every rank where one has others than rank 0: their orders would differ.

    `is_known` says that their fingerprints are made here. One of a data set of the user's may be of what it drew as it
    was made, so of those the numbers of samples are held against each other.
    """
    own = [None if each is None else (each.samples, each.fingerprint if is_known else "") for each in pair]
    first = world.share(own)

    def check() -> None:
        if differs := next((both for both in zip(own, first, strict=True) if both[0] != both[1]), None):
            mine, its = (f"{each[0]:,} samples {each[1]}".rstrip() if each else "none" for each in differs)
            raise DataError(
                f"rank {world.rank} finds other data than rank 0", f"they are {mine}, and rank 0's are {its}",
                "give every node the same files, and every process of a data set of your own all of its samples",
            )  # fmt: skip

    Ranks().attempt("the data of the ranks were not compared", check)
    return pair


def open_data(task: Task, world: World) -> tuple[Source, Source | None, dict[str, Source]]:
    """Return what is trained on, what is held out, and further held-out sets by name. Every rank calls it.

    Where the data hold out nothing, the first of the sets is what is held out, and no further one.
    """
    source, held_out = open_together(task.data, task.seed, world)
    sets = open_sets(task, world, held_out or source)
    if held_out is None and sets:
        held_out = sets.pop(next(iter(sets)))
    return source, held_out, sets


def open_sets(task: Task, world: World, like: Source) -> dict[str, Source]:
    """Return the further sets of held-out data by name. Every rank calls it. Raises as `open_set`."""
    return {each.name: open_set(task, each, world, like, f"task.evaluate.sets '{each.name}'")
            for each in task.evaluate.sets}  # fmt: skip


def open_set(task: Task, each: HeldOutSetSpec, world: World, like: Source, called: str) -> Source:
    """Return a set of held-out data. Every rank calls it. Raises ConfigError where its samples are not like the task's.

    `called` is what an error calls the set.
    """
    source = _in_classes_of(open_together(_data_of(task, each), task.seed, world)[0], like)
    if differs := difference_of(source, like, ("unit", "vocab", "items_per_sample")) or tokens_differ(source, like):
        raise ConfigError(f"the samples of {called} are not like those of task.data", differs, "data of the same kind")
    return source


def _in_classes_of(source: Source, like: Source) -> Source:
    """Return a set's source with labels that count the task's classes, where it has some of them and no others."""
    own, known = getattr(source, "classes", None), getattr(like, "classes", None)
    if own and known and tuple(own) != tuple(known) and set(own) <= set(known) and hasattr(source, "counted_by"):
        counted: Source = source.counted_by(known)
        return counted
    return source


def _data_of(task: Task, each: HeldOutSetSpec) -> object:
    """Return what a further set is read from: an object as it is, all of a source that is read as the task's own is."""
    if not isinstance(each.source, str):
        return each.source
    data = task.data if isinstance(task.data, DataSpec) else DataSpec()
    first, include = data.parts()[0], each.include or data.include
    if first.tokenizer == "bpe":  # which each text would learn anew
        first = dataclasses.replace(first, tokenizer=f"{LEARNT}{Path(_corpus_of(first).folder) / TOKENIZER}")
    return dataclasses.replace(first, source=each.source, include=include, validation_fraction=0.0, mix=())


def _corpus_of(data: DataSpec) -> Corpus:
    """Return the tokens that the run's own text has become, which is in the cache by now."""
    from paceline.task.data.sources.tables.store import open_table

    return open_table(data).corpus if kind_of_source(data.source)[0] == "table" else open_corpus(data)


def _open_part(data: DataSpec, seed: int, world: World) -> Pair:
    """Return the sources of data that are no mixture. Every rank calls it."""
    if data.collate or not is_text(data.source):
        return open_sources(dataclasses.replace(data, shuffle="global"), seed)
    what = f"the data of '{data.source}' were not opened"
    first = _together(what, world, (lambda: _prepared(data)) if world.is_first else None)
    key = world.share(first.key if first else "")
    of_node = world.local_rank == 0 and not world.is_first
    second = _together(what, world, (lambda: _on_node(data, key, world.rank)) if of_node else None)
    corpus = Ranks().attempt(what, lambda: first or second or _mapped(data, key, world.rank))
    return corpus_sources(corpus, data)


def _together(what: str, world: World, work: Callable[[], Corpus] | None) -> Corpus | None:
    """Return what `work()` returns, where a rank has work, when all that have some are done. Every rank calls it.

    The work is done beside the ranks' questions to each other, so that no collective waits for it.
    """
    found: list[Corpus] = []
    errors: list[BaseException] = []

    def do() -> None:
        try:
            found.extend([work()] if work else [])
        except BaseException as error:  # raised below, in the thread that all ranks wait in
            errors.append(error)

    working, pause = threading.Thread(target=do, name="paceline-data", daemon=True), 0.005
    working.start()
    while world.maximum([float(working.is_alive())])[0]:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def outcome() -> Corpus | None:
        if errors:
            raise errors[0]
        return found[0] if found else None

    return Ranks().attempt(what, outcome)


def _prepared(data: DataSpec, corpus: Corpus | None = None) -> Corpus:
    """Return the corpus, tokenised and packed into the cache of this node where it is not there."""
    corpus = corpus or open_corpus(data)
    corpus_sources(corpus, data)
    return corpus


def _on_node(data: DataSpec, key: str, rank: int) -> Corpus:
    """Return the corpus from this node's cache, built into it where it is not there."""
    corpus = _prepared(data, known_corpus(data, key))
    if corpus.key != key:
        raise DataError(
            f"rank {rank} finds other documents in '{data.source}' than rank 0",
            f"they make the corpus {corpus.key}, and rank 0's is {key}",
            "give every node the same files and the same version of tokenizers",
        ).naming_ranks()
    return corpus


def _mapped(data: DataSpec, key: str, rank: int) -> Corpus:
    """Return the corpus that the first rank of this node has seen to."""
    corpus = known_corpus(data, key)
    if corpus is None:
        raise DataError(
            f"rank {rank} does not find the tokenised documents of '{data.source}'",
            "the first rank of its node has them in a cache that this rank does not see",
            'name a folder that all ranks of a node share: task.data.cache_dir = "/path"',
        ).naming_ranks()
    return corpus
