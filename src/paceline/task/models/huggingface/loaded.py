"""Files of weights under the names that a model of transformers has in memory: prefixes, stacked experts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from paceline.task.models.huggingface.experts import IN_MIXTRAL, IN_QWEN3, Inside, JoinedExperts, Stored, has_single
from paceline.task.models.huggingface.names import COMPUTED

if TYPE_CHECKING:
    from torch import Tensor, nn


class OtherNames:
    """Stored tensors under other names."""

    def __init__(self, stored: Stored, names: dict[str, str]) -> None:
        self._stored, self._names = stored, names

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a part of a tensor; the rest is not read."""
        return self._stored.part(self._names[name], offsets, sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from its file's header."""
        return self._stored.shape(self._names[name])


def as_in_memory(model: nn.Module, stored: Stored) -> Stored:
    """Return stored tensors under the names that a model of transformers has for them, any other model's as they are.

    A file may hold the model below its head without its prefix, as GPT-2's does, or have a prefix where the model has
    none; experts that it holds one by one are stacked in memory; names that transformers has changed since it was
    written (BERT's LayerNorm.gamma, GPT-NeoX's embed_out) are taken for those of now.
    """
    wanted = {*(name for name, _ in model.named_parameters(remove_duplicate=False)), *model.state_dict(keep_vars=True)}
    stacked = any(name.endswith(".experts.gate_up_proj") and name not in stored for name in wanted)
    if stacked and has_single(stored):
        stored = JoinedExperts(stored)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    stored = _by_names_of_now(model, stored, wanted, prefix)
    if prefix == ".":
        return stored
    theirs, ours = (any(name.startswith(prefix) for name in names) for names in (stored, wanted))
    names = {_prefixed(name, wanted, prefix, lacks=ours and not theirs): name for name in stored}
    return OtherNames(stored, names) if len(names) == len(stored) else stored


def _prefixed(name: str, wanted: Collection[str], prefix: str, *, lacks: bool) -> str:
    """Return the name with or without the prefix of the model below the head, whichever the model knows.

    A file of a picture and text model may have the prefix at some names alone. `lacks` says that the file has it at
    none and the model has it: names that are not known get it as well.
    """
    if name in wanted:
        return name
    other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
    return other if other in wanted or lacks else name


def _by_names_of_now(model: nn.Module, stored: Stored, wanted: Collection[str], prefix: str) -> Stored:
    """Return stored tensors under the names that transformers has given them since, where that makes them the model's.

    Transformers 5 keeps the changes in its conversion_mapping; of older ones names stay as they are.
    """
    known = {*wanted, *(name.removeprefix(prefix) for name in wanted), *(prefix + name for name in wanted)}
    if all(name in known for name in stored):
        return stored
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
        from transformers.modeling_utils import PreTrainedModel
    except ImportError:
        return stored
    if not isinstance(model, PreTrainedModel):
        return stored
    changes = [change for change in get_model_conversion_mapping(_of_own_class(model))
               if isinstance(change, WeightRenaming)]  # fmt: skip
    names: dict[str, str] = {}
    for name in stored:
        now = name
        for change in changes if name not in known else ():
            now = change.rename_source_key(now)[0]
        names[now if now in known else name] = name
    return OtherNames(stored, names) if len(names) == len(stored) else stored


def _of_own_class(model: Any) -> Any:
    """Return the same model as an object of the class that it was built of.

    FSDP2 gives a module a class of its own, and transformers finds the changes of names by the name of the class.
    """
    own = next(each for each in type(model).__mro__ if not each.__module__.startswith("torch.distributed."))
    if own is type(model):
        return model
    same: Any = object.__new__(own)
    same.__dict__ = model.__dict__
    return same


def embeddings_of(model: Any) -> list[str]:
    """Return the names of a model's matrices that have a row for each token: of its embedding, and of its head."""
    layers: list[object] = [_layer_of(model, get) for get in ("get_input_embeddings", "get_output_embeddings")]
    weights = {id(layer.weight) for layer in layers if hasattr(layer, "weight")}
    return [name for name, parameter in model.named_parameters() if id(parameter) in weights]


def _layer_of(model: object, get: str) -> object:
    """Return the layer that a model's method gives, None where it has none: models of images may raise."""
    try:
        return getattr(model, get, lambda: None)()
    except NotImplementedError:
        return None


def may_ignore(model: object, name: str) -> bool:
    """Return whether a file may hold a tensor that the model lacks: it is computed, or transformers says so."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return name.endswith(COMPUTED) or any(re.search(pattern, name) for pattern in patterns)


def names_in_files(model: Any, names: Collection[str]) -> dict[str, str]:
    """Return the names that files of a model of transformers have for those it has in memory; experts are left alone.

    Releases of transformers rename layers (ViT's since 5, GPT-NeoX's head) and keep the files' names for every reader
    that knows the old ones. Of releases without such a table, names of files are those in memory.
    """
    changes = [change for change in _changes_of(model)[::-1] if type(change).__name__ != "PrefixChange"]
    back = [change.reverse_transform() for change in changes]
    found = {}
    for name in names:
        file = name
        for change in back:
            file = change.rename_source_key(file)[0]
        found[name] = file
    return found


def _changes_of(model: Any) -> list[Any]:
    """Return the changes of names that transformers makes of files of now, those of older files left out."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:
        return []
    changes = get_model_conversion_mapping(model, add_legacy=False)
    return [change for change in changes if isinstance(change, WeightRenaming)]


def experts_in_files(model: Any, stacked: str) -> Inside | None:
    """Return how files of a model name experts that stand alone in them, None where they are stacked there too.

    `stacked` is the name of a stacked tensor of the model.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return IN_MIXTRAL if model.config.model_type == "mixtral" else IN_QWEN3
    sources = [
        source
        for change in get_model_conversion_mapping(model, add_legacy=False)
        for source in change.source_patterns
        if "experts.*." in source
    ]
    if not sources:
        return None
    is_short = any(".w1." in source for source in sources)
    module = stacked.rpartition(".experts.")[0].rpartition(".")[2]
    return IN_MIXTRAL if is_short and module == IN_MIXTRAL.in_memory else Inside(module, is_short)
