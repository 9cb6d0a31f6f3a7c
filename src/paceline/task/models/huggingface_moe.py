"""Mixtures of experts in Hugging Face's names: Mixtral's checkpoints keep every expert's matrices by themselves.

In memory the names of MixtralForCausalLM (transformers 5) and ours agree: `mlp.gate.weight`, and the stacked
`mlp.experts.gate_up_proj` and `mlp.experts.down_proj`. In files, of every version, expert 3 has
`block_sparse_moe.experts.3.w1.weight` (gate), `.w3.weight` (up) and `.w2.weight` (down).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.task.models.sizes import MoEConfig

_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(r"(.*\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight$")
_PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class Stored(Protocol):
    """Tensors by name that are read when they are asked for."""

    def __getitem__(self, name: str) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


class SplitExperts(Mapping[str, Tensor]):
    """A state of ours under the names of Mixtral's files: stacked experts one by one, the router renamed.

    The state may be lazy: one stacked tensor is held at a time.
    """

    def __init__(self, state: Mapping[str, Tensor], experts: int) -> None:
        self._state = state
        self._places: dict[str, tuple[str, int, int]] = {}  # file's name -> (ours, expert or -1, which of its parts)
        self._held: tuple[str, Tensor] | None = None
        for name in state:
            stacked = _STACKED.match(name)
            if stacked is None:
                self._places[name.replace(".mlp.", ".block_sparse_moe.")] = (name, -1, 0)
                continue
            for index in range(experts):
                for place, part in enumerate(_PARTS[stacked[2]]):
                    self._places[f"{stacked[1]}block_sparse_moe.experts.{index}.{part}.weight"] = (name, index, place)

    def __getitem__(self, name: str) -> Tensor:
        ours, expert, place = self._places[name]
        if expert < 0:
            return self._state[ours]
        if self._held is None or self._held[0] != ours:
            self._held = (ours, self._state[ours])
        parts = 2 if ours.endswith("gate_up_proj") else 1
        return self._held[1][expert].chunk(parts)[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class StackedExperts(Mapping[str, Tensor]):
    """Stored tensors under our names, whether their experts are stored one by one or stacked."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._names: dict[str, str] = {}  # ours -> the file's
        self._experts: dict[str, int] = {}  # stacked name -> how many experts there are
        for name in stored:
            single = _SINGLE.match(name)
            if single is None:
                self._names[name.replace(".block_sparse_moe.", ".mlp.")] = name
                continue
            kind = "down_proj" if single[3] == "w2" else "gate_up_proj"
            stacked = f"{single[1]}mlp.experts.{kind}"
            self._experts[stacked] = max(self._experts.get(stacked, 0), int(single[2]) + 1)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._experts:
            return torch.stack([
                torch.cat([self._stored[part] for part in self._parts(name, index)])
                for index in range(self._experts[name])
            ])  # fmt: skip
        return self._stored[self._names[name]]

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return a part of a tensor; of stacked experts, only those in it are read, one at a time."""
        if name not in self._experts:
            return self._stored.part(self._names[name], offsets, sizes)
        found = []
        for index in range(offsets[0], offsets[0] + sizes[0]):
            rows = torch.cat([self._stored[part] for part in self._parts(name, index)])
            rows = rows.narrow(0, offsets[1], sizes[1]).narrow(1, offsets[2], sizes[2])
            found.append(rows.clone())  # of a view the whole would stay
        return torch.stack(found)

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._experts

    def __len__(self) -> int:
        return len(self._names) + len(self._experts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the files' headers."""
        if name not in self._experts:
            return self._stored.shape(self._names[name])
        shapes = [self._stored.shape(part) for part in self._parts(name, 0)]
        return (self._experts[name], sum(shape[0] for shape in shapes), shapes[0][1])

    def _parts(self, name: str, index: int) -> list[str]:
        stacked = _STACKED.match(name)
        assert stacked is not None
        return [f"{stacked[1]}block_sparse_moe.experts.{index}.{part}.weight" for part in _PARTS[stacked[2]]]


def mixtral_config(config: MoEConfig) -> dict[str, Any]:
    """Return what a MixtralForCausalLM's config.json says beyond a LlamaForCausalLM's.

    Raises ConfigError for what that model cannot compute.
    """
    foreign = {
        "shared experts": config.shared_ffn, "dense layers": config.dense_layers,
        "weights that are not renormalised": not config.renormalise, "a selection bias": config.balance == "bias",
    }  # fmt: skip
    if any(foreign.values()):
        raise ConfigError(
            f"model {config.name} has no counterpart in transformers",
            f"MixtralForCausalLM has no {', no '.join(what for what, present in foreign.items() if present)}",
            "safetensors under our own names: paceline.run.checkpoint.consolidate",
        )
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": config.expert_ffn,
        "num_local_experts": config.experts, "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance_weight, "sliding_window": None,
    }  # fmt: skip
