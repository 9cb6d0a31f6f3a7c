"""What a model takes over of files of another one, and what starts fresh: a new head, more rows of a vocabulary.

Imports torch where values are made alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, suggestion
from paceline.task.models.huggingface.experts import StackedExperts, Stored
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.names import (
    BIAS,
    COMPUTED,
    EMBEDDINGS,
    HEAD,
    PREFIX,
    Shape,
    check_shapes,
    decoder_shapes,
)
from paceline.task.models.shape import DecoderConfig, MoEConfig

if TYPE_CHECKING:
    from torch import Tensor

    Part = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]

ROWS = 4096  # of a matrix that are read at a time for their mean


@dataclass(frozen=True)
class WeightsFit:
    """How files of weights fit a model: what of it is not simply read."""

    fresh: tuple[str, ...] = ()  # names of the model that are drawn
    longer: Mapping[str, int] | None = None  # embeddings with more rows than in the files -> rows there
    left_out: tuple[str, ...] = ()  # names of the files that nothing is made of

    def texts(self) -> list[str]:
        """Return what is told of it, a sentence each."""
        texts = [f"starts fresh: {', '.join(self.fresh)}"] if self.fresh else []
        texts += [f"left out of the weights: {', '.join(self.left_out)}"] if self.left_out else []
        for name, rows in (self.longer or {}).items():
            texts.append(f"{name} has {rows:,} rows in the weights; each row after them starts as their mean")
        return texts


def fit_decoder(config: DecoderConfig, path: str, fresh: Collection[str] = ()) -> WeightsFit:
    """Return how the files of a path fit a built-in decoder. Headers alone are read. Raises as `fit`."""
    stored = read_safetensors(path)
    held: Stored = StackedExperts(stored) if isinstance(config, MoEConfig) else stored
    known = [name for name in held if name.endswith((BIAS, COMPUTED))]
    return fit(decoder_shapes(config), held, [*known, *([HEAD] if config.tied else [])], path, fresh, EMBEDDINGS)


def fit(
    wanted: Mapping[str, Shape],
    stored: Stored,
    aliases: Collection[str],
    path: str,
    fresh: Collection[str] = (),
    embeddings: Collection[str] = (),
    whole: bool = True,
) -> WeightsFit:
    """Return how files fit a model of these names and shapes, where `fresh` are patterns of what is not read.

    Of `embeddings`, names of the model, more rows may be wanted than there are. Raises ConfigError, naming all that
    differs otherwise, and for a pattern that nothing matches, unless the model is not `whole`: a part of another stage.
    """
    drawn = [name for name in wanted if _matches(fresh, name)]
    left_out = [name for name in stored if name not in wanted and _matches(fresh, name)]
    for pattern in fresh if whole else ():
        if not any(_matches([pattern], name) for name in [*drawn, *left_out]):
            raise ConfigError(
                f"task.model.fresh: '{pattern}' matches nothing",
                "neither the model nor its weights have such a name", suggestion(pattern, wanted),
            )  # fmt: skip
    longer = {
        name: stored.shape(name)[0]
        for name in embeddings
        if name in wanted and name in stored and name not in drawn and _is_longer(wanted[name], stored.shape(name))
    }
    read = {name: shape for name, shape in wanted.items() if name not in drawn and name not in longer}
    check_shapes(read, stored, {*aliases, *drawn, *left_out, *longer}, path, fresh)
    return WeightsFit(tuple(drawn), longer, tuple(left_out))


def _matches(patterns: Collection[str], name: str) -> bool:
    """Return whether a pattern matches a name of files, or ours of the same parameter."""
    return any(fnmatchcase(each, pattern) for each in (name, name.removeprefix(PREFIX)) for pattern in patterns)


def _is_longer(wanted: Shape, stored: Shape) -> bool:
    return len(wanted) == len(stored) == 2 and wanted[0] > stored[0] and wanted[1] == stored[1]


def lengthened(stored: Stored, name: str) -> Part:
    """Return what gives parts of a stored matrix that goes on: each row after its own is the mean of those."""
    import torch

    rows = stored.shape(name)[0]

    def part(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        own = max(0, min(rows - offsets[0], sizes[0]))
        columns = (offsets[1], sizes[1])
        read = [stored.part(name, offsets, (own, sizes[1]))] if own else []
        if sizes[0] > own:
            mean = _mean(stored, name, rows, *columns)
            read.append(mean.to(read[0].dtype if read else mean.dtype).expand(sizes[0] - own, -1))
        return torch.cat(read)

    return part


def _mean(stored: Stored, name: str, rows: int, first: int, columns: int) -> Tensor:
    """Return the mean of a matrix's rows, of some columns, summed in fp64: the same whichever columns are asked for."""
    import torch

    total = torch.zeros(columns, dtype=torch.float64)
    for at in range(0, rows, ROWS):
        few = stored.part(name, (at, first), (min(ROWS, rows - at), columns))
        total += few.double().sum(dim=0)
    return (total / rows).float()
