"""What ranks tell each other so that a rank learns, of keys that it holds, what all ranks together say of the keys.

Both talks take log2 N rounds. In each a rank sends to one rank and hears from one, so nothing here grows with N but the
number of rounds. Talks are generators that yield messages and are sent what came for them: real ranks carry them
(`Ranks.hold_talk`), and simulated ones can, all in one process.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

WORD = 2**64
KEY_BYTES = 16
_SAID = struct.Struct(f"<{KEY_BYTES}sQQ")  # of a key: how many ranks said something, and the sum of it
_TOLD = struct.Struct("<QQQ")

T = TypeVar("T")


class Message(NamedTuple):
    """A turn of a talk: what goes to a rank, and the rank that is heard; None for nobody."""

    to: int | None
    source: int | None
    content: bytes


Talk = Generator[Message, bytes, T]


class Holders(NamedTuple):
    """What all ranks say of a key: their number, the sum of it, and a number of this rank's own below theirs."""

    place: int
    ranks: int
    total: int


def add_up(said: Mapping[bytes, int], rank: int, size: int) -> Talk[dict[bytes, Holders]]:
    """Talk until this rank knows of each of its keys what all ranks that have it say, summed modulo 2^64.

    A key travels to the rank that it names, in round k by 2^k ranks where that bit of the distance is set (Bruck et al.
    1997, IEEE Trans. Parallel Distrib. Syst. 8:1143). Keys that meet become one, so no rank gets more of one key than
    a record in each round, however many ranks have it. Answers take the same way back.
    """
    sums: dict[bytes, list[int]] = {}  # key -> [how many ranks, sum], of all that came through here
    leaving: defaultdict[int, list[bytes]] = defaultdict(list)  # round -> keys
    for key, number in said.items():
        sums[key] = [1, number % WORD]
        leaving[_round_of(key, rank, size)].append(key)
    rounds = range((size - 1).bit_length())
    arrived: list[list[tuple[bytes, int]]] = []  # by round: keys, and how many ranks had said something before
    for at in rounds:
        on, back = (rank + 2**at) % size, (rank - 2**at) % size
        heard = yield Message(on, back, b"".join(_SAID.pack(key, *sums[key]) for key in leaving[at]))
        arrived.append([])
        for key, ranks, number in _SAID.iter_unpack(heard):
            if key not in sums:
                sums[key] = [0, 0]
                leaving[_round_of(key, rank, size)].append(key)
            arrived[at].append((key, sums[key][0]))
            sums[key] = [sums[key][0] + ranks, (sums[key][1] + number) % WORD]
    known = {key: Holders(0, *sums[key]) for key in leaving[-1]}  # those that name this rank
    for at in reversed(rounds):
        on, back = (rank + 2**at) % size, (rank - 2**at) % size
        answers = [_TOLD.pack(known[key].place + before, *known[key][1:]) for key, before in arrived[at]]
        heard = yield Message(back, on, b"".join(answers))
        for key, told in zip(leaving[at], _TOLD.iter_unpack(heard), strict=True):
            known[key] = Holders(*told)
    return {key: known[key] for key in said}


def _round_of(key: bytes, rank: int, size: int) -> int:
    """Return the round in which a key leaves a rank: the lowest bit of the way left to go, -1 where there is none."""
    way = (int.from_bytes(key[:8], "little") - rank) % size
    return (way & -way).bit_length() - 1


def collect(own: Mapping[str, object], rank: int, size: int, merge: Any) -> Talk[dict[str, Any]]:
    """Talk until rank 0 has one table of all ranks' own, of plain JSON; others have a part of it.

    What two ranks say of one name is `merge(lower rank's, higher rank's)`. Names come in the order of the ranks.
    """
    table = dict(own)
    for at in range((size - 1).bit_length()):
        if rank % 2 ** (at + 1):
            yield Message(rank - 2**at, None, json.dumps(table, separators=(",", ":")).encode())
            break
        if rank + 2**at < size:
            heard = yield Message(None, rank + 2**at, b"")
            for name, entry in json.loads(heard).items():
                table[name] = merge(table[name], entry) if name in table else entry
    return table


def carry(talks: Sequence[Talk[T]]) -> tuple[list[T], list[int]]:
    """Return what the talks of ranks 0, 1, ... come to, all held in this process, and the bytes that each heard."""
    results: dict[int, T] = {}
    heard = [0] * len(talks)
    letters: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # (from, to) -> on their way
    turns: dict[int, Message] = {}
    ready: deque[tuple[int, bytes | None]] = deque((rank, None) for rank in range(len(talks)))
    while ready:
        rank, content = ready.popleft()
        heard[rank] += len(content or b"")
        try:
            turn = turns[rank] = next(talks[rank]) if content is None else talks[rank].send(content)
        except StopIteration as ended:
            results[rank] = ended.value
            turns[rank] = Message(None, None, b"")
            continue
        if turn.to is not None:
            letters[rank, turn.to].append(turn.content)
        if turn.source is None:
            ready.append((rank, b""))
        for to in (rank, turn.to):  # who may go on now
            source = turns[to].source if to is not None and to in turns else None
            if to is not None and source is not None and letters[source, to]:
                ready.append((to, letters[source, to].popleft()))
                turns[to] = turns[to]._replace(source=None)
    return [results[rank] for rank in range(len(talks))], heard
