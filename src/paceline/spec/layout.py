"""Layout: the degrees of the mesh axes. The only place that knows mesh arithmetic.

    devices = dp_replicate * dp_shard * cp * tp * pp

`ep` does not multiply: experts are spread over devices of the `dp_shard * cp` part of the mesh, so `ep` divides it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.config.fields import option
from paceline.errors import ConfigError

# Outermost first: neighbours in rank order share the innermost axis, the chattiest one.
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks along these read other samples
MODEL_AXES = ("cp", "tp", "pp", "ep")  # ranks along these share the work on a sample


@dataclass(frozen=True)
class Layout:
    """How many devices each axis of parallelism spans."""

    dp_replicate: int = option(1, "copies of the model, each on its own part of the batch", minimum=1)
    dp_shard: int = option(1, "devices that share one copy's weights, gradients and optimizer state", minimum=1)
    cp: int = option(1, "devices that share one sequence", minimum=1)
    tp: int = option(1, "devices that share one layer's matrices", minimum=1)
    pp: int = option(1, "pipeline stages", minimum=1)
    ep: int = option(1, "devices that share one layer's experts", minimum=1)

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ConfigError(f"layout {field.name} = {degree!r}", "a degree is a whole number of at least 1", "1")
        if (self.dp_shard * self.cp) % self.ep:
            raise ConfigError(
                f"layout ep = {self.ep} with dp_shard * cp = {self.dp_shard * self.cp}",
                "experts are spread over the dp_shard and cp axes, so ep must divide their product",
                f"ep = {self.dp_shard * self.cp}",
            )

    @property
    def devices(self) -> int:
        """The number of devices the layout occupies."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def data_degree(self) -> int:
        """The number of groups of devices that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def state_degree(self) -> int:
        """The number of devices that one copy's state is sharded over: `dp_shard` and `cp` together."""
        return self.dp_shard * self.cp

    @property
    def is_sharded(self) -> bool:
        """Whether weights are held in shards: see `holds_shards`."""
        return bool(holds_shards({**self.mesh_shape, "ep": self.ep}))

    def group(self, axis: str) -> tuple[int, int]:
        """Return (size, ranks from one member to the next) of the groups along an axis: see `group_of`."""
        return group_of({**self.mesh_shape, "ep": self.ep}, axis)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis name to degree, in the mesh's order, outermost first."""
        return {axis: getattr(self, axis) for axis in MESH_ORDER}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's coordinate on every mesh axis."""
        place = {}
        for axis in reversed(MESH_ORDER):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in MESH_ORDER}

    def data_rank(self, rank: int) -> int:
        """Return which of the `data_degree` parts of every batch the rank reads."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def reads_first(self, rank: int) -> bool:
        """Return whether the rank is the first of those that read the same part of every batch."""
        place = self.coordinates(rank)
        return not (place["pp"] or place["cp"] or place["tp"])

    def __str__(self) -> str:
        degrees = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)]
        return " ".join(degree for degree in degrees if not degree.endswith("=1")) or "single device"


def group_of(degrees: Mapping[str, Any], axis: str) -> tuple[Any, Any]:
    """Return (size, ranks from one member to the next) of the groups along a mesh axis.

    Besides the mesh's own axes there are `data` (dp_replicate x dp_shard x cp), `fsdp` (dp_shard x cp), and inside
    `fsdp` its inner part `ep` and its outer part `expert_shard`, over which one part of the experts is sharded. Degrees
    are whole numbers, or arrays of them for many layouts at once.
    """
    state, tp, ep = degrees["dp_shard"] * degrees["cp"], degrees["tp"], degrees["ep"]
    if axis == "fsdp":
        return state, tp
    if axis == "data":
        return degrees["dp_replicate"] * state, tp
    if axis == "ep":
        return ep, tp
    if axis == "expert_shard":
        return state // ep, tp * ep
    inner = MESH_ORDER[MESH_ORDER.index(axis) + 1 :]
    return degrees[axis], math.prod(degrees[name] for name in inner)


def holds_shards(degrees: Mapping[str, Any]) -> Any:
    """Return whether FSDP2 holds the weights: where ranks share a copy's state, or an axis splits the model itself.

    In the second case it also sums gradients over `dp_replicate`, since it knows how to do that for split weights.
    Degrees are whole numbers, or arrays of them for many layouts at once.
    """
    splits_model = (degrees["tp"] > 1) | (degrees["pp"] > 1) | (degrees["ep"] > 1)
    return (degrees["dp_shard"] * degrees["cp"] > 1) | (splits_model & (degrees["dp_replicate"] > 1))


def layouts_over(devices: int, degrees: Mapping[str, Sequence[int]]) -> Iterator[Layout]:
    """Yield every layout of exactly `devices` devices whose degrees are among those given; axes left out stay at 1."""
    allowed = {axis: sorted(set(degrees.get(axis, (1,)))) for axis in (*MESH_ORDER, "ep")}

    def spread(rest: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if not axes:
            if rest == 1:
                yield {}
            return
        for degree in allowed[axes[0]]:
            if rest % degree == 0:
                for others in spread(rest // degree, axes[1:]):
                    yield {axes[0]: degree, **others}

    for mesh in spread(devices, ("dp_replicate", "dp_shard", "cp", "tp", "pp")):
        for ep in allowed["ep"]:
            if (mesh["dp_shard"] * mesh["cp"]) % ep == 0:
                yield Layout(**mesh, ep=ep)


def rows_of(batch_samples: int, data_degree: int, data_rank: int, shares: Sequence[int] = ()) -> range:
    """Return the rows of a global batch that one data rank reads: contiguous parts, as even as can be.

    With `shares`, one for every data rank, the parts are in their proportion: they are the shares where those add up
    to the batch.
    """
    shares = shares or (1,) * data_degree
    whole, before = sum(shares), sum(shares[:data_rank])
    return range(batch_samples * before // whole, batch_samples * (before + shares[data_rank]) // whole)


def data_rank_paces(layout: Layout, paces: Sequence[float]) -> tuple[float, ...]:
    """Return how long each data rank takes for the same work, from what its ranks do: its slowest rank's pace."""
    found = [0.0] * layout.data_degree
    for rank, pace in enumerate(paces[: layout.devices]):
        found[layout.data_rank(rank)] = max(found[layout.data_rank(rank)], pace)
    return tuple(found)


def largest_part(batch_samples: int, data_degree: int, shares: Sequence[int] = ()) -> int:
    """Return the most rows of a global batch that a data rank reads; `shares` as in `rows_of`."""
    if not shares:
        return -(-batch_samples // data_degree)
    ends = [batch_samples * end // sum(shares) for end in itertools.accumulate(shares, initial=0)]
    return max(last - first for first, last in itertools.pairwise(ends))


def accumulation_for(batch_samples: int, data_degree: int, micro_batch: int, shares: Sequence[int] = ()) -> int:
    """Return how many micro-batches every data rank runs so that the largest part of the batch is covered."""
    return -(-largest_part(batch_samples, data_degree, shares) // micro_batch)
