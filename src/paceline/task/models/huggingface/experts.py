"""Mixtures of experts in Hugging Face's names: checkpoints keep every expert's matrices by themselves.

In memory the names of MixtralForCausalLM and Qwen3MoeForCausalLM (transformers 5) and ours agree: `mlp.gate.weight`,
and the stacked `mlp.experts.gate_up_proj`, where ours has a dimension of gate and up, and `mlp.experts.down_proj`. In
files, of every version, expert 3 has

- in Mixtral's `block_sparse_moe.experts.3.w1.weight` (gate), `.w3.weight` (up) and `.w2.weight` (down);
- in Qwen3's and DeepSeek's `mlp.experts.3.gate_proj.weight`, `.up_proj.weight` and `.down_proj.weight`;
- in Jamba's and LFM2's `feed_forward.experts.3`, by the second and by the first of these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.errors import ConfigError
from paceline.task.models.shape import MoEConfig

if TYPE_CHECKING:
    from torch import Tensor

_STACKED = re.compile(r"(.*\.)(mlp|feed_forward)\.experts\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(
    r"(.*\.)(block_sparse_moe|mlp|feed_forward)\.experts\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)\.weight$"
)
_RENAMED = {"block_sparse_moe": "mlp"}  # modules of files that are others in memory
_SHORT = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_LONG = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Inside:
    """How files name experts one by one: by the module they lie in, and whether their matrices are w1, w2 and w3."""

    module: str
    is_short: bool

    @property
    def in_memory(self) -> str:
        """The module that they lie in, in memory."""
        return _RENAMED.get(self.module, self.module)

    def parts(self, stacked: str) -> tuple[str, ...]:
        """Return the matrices of one expert that a stacked tensor of this kind holds."""
        return (_SHORT if self.is_short else _LONG)[stacked]


IN_MIXTRAL, IN_QWEN3 = Inside("block_sparse_moe", True), Inside("mlp", False)


def has_single(names: Iterable[str]) -> bool:
    """Return whether files hold experts one by one."""
    return any(_SINGLE.match(name) for name in names)


class Stored(Protocol):
    """Tensors by name that are read when they are asked for."""

    def __getitem__(self, name: str) -> Tensor: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


def apart(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of ours: of joined gates and ups [experts, 2 x width, hidden], [experts, 2, width, hidden]."""
    joined = name.endswith("gate_up_proj") and tensor.dim() == 3
    return tensor.unflatten(1, (2, -1)) if joined else tensor


def joined(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of theirs: of gates and ups apart [experts, 2, width, hidden], [experts, 2 x width, hidden]."""
    return tensor.flatten(1, 2) if name.endswith("experts.gate_up_proj") else tensor


class SplitExperts(Mapping[str, "Tensor"]):
    """A state of ours under the names of files that hold experts one by one: stacked ones apart, Mixtral's renamed.

    The state may be lazy: one stacked tensor is held at a time. Gates and ups may be joined in it, as in transformers.
    """

    def __init__(self, state: Mapping[str, Tensor], experts: int, inside: Inside) -> None:
        self._state = state
        self._places: dict[str, tuple[str, int, int]] = {}  # file's name -> (ours, expert or -1, which of its parts)
        self._held: tuple[str, Tensor] | None = None
        for name in state:
            stacked = _STACKED.match(name)
            if stacked is None:
                self._places[name.replace(f".{inside.in_memory}.", f".{inside.module}.")] = (name, -1, 0)
                continue
            for index in range(experts):
                for place, part in enumerate(inside.parts(stacked[3])):
                    self._places[f"{stacked[1]}{inside.module}.experts.{index}.{part}.weight"] = (name, index, place)

    def __getitem__(self, name: str) -> Tensor:
        ours, expert, place = self._places[name]
        if expert < 0:
            return self._state[ours]
        if self._held is None or self._held[0] != ours:
            self._held = (ours, apart(ours, self._state[ours]))
        matrices = self._held[1][expert]
        return matrices[place] if ours.endswith("gate_up_proj") else matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class StackedExperts(Mapping[str, "Tensor"]):
    """Stored tensors under our names, whether their experts are stored one by one or stacked."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._names: dict[str, str] = {}  # ours -> the file's
        self._experts: dict[str, int] = {}  # stacked name -> how many experts there are
        self._inside = IN_QWEN3  # of single experts
        for name in stored:
            single = _SINGLE.match(name)
            if single is None:
                self._names[name.replace(".block_sparse_moe.", ".mlp.")] = name
                continue
            self._inside = Inside(single[2], single[4].startswith("w"))
            kind = "down_proj" if single[4] in ("w2", "down_proj") else "gate_up_proj"
            stacked = f"{single[1]}{self._inside.in_memory}.experts.{kind}"
            self._experts[stacked] = max(self._experts.get(stacked, 0), int(single[3]) + 1)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._experts:
            return apart(name, self._stored[self._names[name]])
        import torch

        join = torch.stack if name.endswith("gate_up_proj") else torch.cat
        return torch.stack(
            [join([self._stored[part] for part in self._parts(name, index)]) for index in range(self._experts[name])]
        )

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a part of a tensor; of stacked experts, only those in it are read, one at a time."""
        import torch

        if name in self._experts:
            experts = range(offsets[0], offsets[0] + sizes[0])
            return torch.stack([self._part_of_one(name, index, offsets[1:], sizes[1:]) for index in experts])
        file, stored = self._names[name], self._stored
        if len(offsets) == len(stored.shape(file)):
            return stored.part(file, offsets, sizes)
        width = stored.shape(file)[1] // 2  # the file joins gates and ups, one after the other
        return torch.stack(
            [
                stored.part(file, (offsets[0], half * width + offsets[2], offsets[3]), (sizes[0], *sizes[2:]))
                for half in range(offsets[1], offsets[1] + sizes[1])
            ],
            dim=1,
        )

    def _part_of_one(self, name: str, expert: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a part of one expert's matrices: [2, width, hidden] of gates and ups, else [hidden, width]."""
        import torch

        files = self._parts(name, expert)
        if len(files) == 1:
            return self._stored.part(files[0], offsets, sizes)
        chosen = files[offsets[0] : offsets[0] + sizes[0]]
        return torch.stack([self._stored.part(file, offsets[1:], sizes[1:]) for file in chosen])

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._experts

    def __len__(self) -> int:
        return len(self._names) + len(self._experts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the files' headers."""
        if name not in self._experts:
            shape = self._stored.shape(self._names[name])
            joined = name.endswith("gate_up_proj") and len(shape) == 3
            return (shape[0], 2, shape[1] // 2, shape[2]) if joined else shape
        shapes = [self._stored.shape(part) for part in self._parts(name, 0)]
        return (self._experts[name], *((2,) if len(shapes) == 2 else ()), *shapes[0])

    def _parts(self, name: str, index: int) -> list[str]:
        stacked = _STACKED.match(name)
        assert stacked is not None
        parts = self._inside.parts(stacked[3])
        return [f"{stacked[1]}{self._inside.module}.experts.{index}.{part}.weight" for part in parts]


class JoinedExperts(StackedExperts):
    """Stacked experts as transformers holds them: gates and ups are joined, [experts, 2 x width, hidden]."""

    def __getitem__(self, name: str) -> Tensor:
        return joined(name, super().__getitem__(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the files' headers."""
        shape = super().shape(name)
        return (shape[0], 2 * shape[2], shape[3]) if self._is_apart(name) else shape

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a part of a tensor; of joined gates and ups, whole matrices of the experts in it are read."""
        if not self._is_apart(name):
            return super().part(name, offsets, sizes)
        width = super().shape(name)[2]
        whole = super().part(name, (offsets[0], 0, 0, offsets[2]), (sizes[0], 2, width, sizes[2]))
        return joined(name, whole)[:, offsets[1] : offsets[1] + sizes[1]]

    def _is_apart(self, name: str) -> bool:
        return name.endswith("experts.gate_up_proj") and len(super().shape(name)) == 4


def moe_config(config: MoEConfig) -> dict[str, object]:
    """Return what the config.json of a MixtralForCausalLM, or Qwen3MoeForCausalLM, says beyond a LlamaForCausalLM's.

    Raises ConfigError for what that model cannot compute.
    """
    kind = "Qwen3MoeForCausalLM" if config.qk_norm else "MixtralForCausalLM"
    foreign = {
        "shared experts": config.shared_ffn, "selection bias": config.balance == "bias",
        "sigmoid scores": config.scoring == "sigmoid", "dense layers": config.dense_layers and not config.qk_norm,
        "weights that are not renormalised": not config.renormalise and not config.qk_norm,
    }  # fmt: skip
    if any(foreign.values()):
        raise ConfigError(
            f"model {config.name} has no counterpart in transformers",
            f"{kind} has no {', no '.join(what for what, present in foreign.items() if present)}",
            "safetensors under our own names: paceline.checkpoint.consolidate",
        )
    common = {
        "architectures": [kind], "num_experts_per_tok": config.top_k, "router_aux_loss_coef": config.balance_weight,
        "sliding_window": None,
    }  # fmt: skip
    if not config.qk_norm:
        mixtral = {"model_type": "mixtral", "intermediate_size": config.expert_ffn}
        return {**common, **mixtral, "num_local_experts": config.experts}
    return {
        **common, "model_type": "qwen3_moe", "moe_intermediate_size": config.expert_ffn, "num_experts": config.experts,
        "norm_topk_prob": config.renormalise, "decoder_sparse_step": 1, "use_sliding_window": False,
        "mlp_only_layers": list(range(config.dense_layers)),
    }  # fmt: skip
