"""What each choice for activations keeps between the forward and the backward pass, and what it computes again.

Counted, not timed: the storages that are alive when a forward pass of a decoder's blocks is over, and the FLOPs of the
matrix products and of attention in a whole step, against those of a step without recompute. Runs on a CPU.

    python benchmarks/costs/memory.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from paceline.cluster.catalog.devices import (
    find_entry,
    published_device,
    published_links,
    published_price,
    published_watts,
)
from paceline.plan.cost.sheet import PricedTask
from paceline.run.memory.offload import HostCopies, keep_on_host
from paceline.run.memory.recompute import checkpoint_block
from paceline.spec.cluster import Cluster, Figure
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import machine

CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("budget 0.75", {"recompute": "budget", "recompute_budget": 0.75}),
    ("budget 0.5", {"recompute": "budget", "recompute_budget": 0.5}),
    ("budget 0.25", {"recompute": "budget", "recompute_budget": 0.25}),
    ("selective", {"recompute": "selective"}),
    ("selective, attention kept", {"recompute": "selective", "recompute_save": ("attention",)}),
    ("full", {"recompute": "full"}),
    ("none, activations on the host", {"offload": "activations"}),
    ("full, activations on the host", {"recompute": "full", "offload": "activations"}),
]


class Alive(TorchDispatchMode):
    """Watches the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._made[reference.cdata] = (reference, storage.nbytes())
        return result

    def bytes(self, without: set[int]) -> int:
        """Return the bytes of those that are still alive, but for those at some addresses."""
        return sum(size for at, (storage, size) in self._made.items() if at not in without and not storage.expired())


def measure(model: Any, blocks: list[nn.Module], tokens: torch.Tensor) -> tuple[int, float]:
    """Return the bytes that the blocks keep after a forward pass, and the FLOPs of the whole step."""
    # Not counted: weights, which `view`s of them would bring in, and what is on the host.
    left_out = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    real = HostCopies.to_host

    def counted(link: HostCopies, values: torch.Tensor) -> torch.Tensor:
        copy = real(link, values)
        left_out.add(copy.untyped_storage()._cdata)
        return copy

    alive = Alive()
    x, cos, sin = model.begin(tokens, None)
    with FlopCounterMode(display=False) as flops:
        with alive, mock.patch.object(HostCopies, "to_host", counted):
            for block in blocks:
                x = block(x, cos, sin)
        held = alive.bytes({*left_out, x.untyped_storage()._cdata})  # the result is the next module's
        x.sum().backward()
    return held, float(flops.get_total_flops())


def rows(spec: ModelSpec, seq_len: int, samples: int) -> list[dict[str, Any]]:
    """Return a row for every choice: bytes kept and FLOPs, counted and forecast, over those without recompute."""
    config = resolve_decoder(spec, 0, seq_len)
    profile = profile_decoder(config, seq_len)
    context = PricedTask(profile, accelerator(), samples, 1)
    tokens = torch.randint(config.vocab, (samples, seq_len), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, Any]] = []
    for name, changes in CHOICES:
        plan = context.with_blocks(Plan(micro_batch=samples, batch_samples=samples, precision="bf16", **changes))
        model: Any = build_model(spec, 0, seq_len, seed=0).to(torch.bfloat16)
        blocks = list(model.layers)
        for index, block in enumerate(blocks):
            checkpoint_block(block, plan.recompute_of(index), plan.recompute_save, plan.compile)
        if plan.offloads_activations:
            keep_on_host(blocks)
        held, flops = measure(model, blocks, tokens)
        found.append(
            {"choice": name, "bytes": held, "flops": flops, "forecast_bytes": forecast(context, plan, samples)}
        )
    first = found[0]
    for row in found:
        row["kept"], row["computed"] = row["bytes"] / first["bytes"], row["flops"] / first["flops"]
        row["forecast_kept"] = row["forecast_bytes"] / first["forecast_bytes"]
    return found


def forecast(context: PricedTask, plan: Plan, samples: int) -> float:
    """Return the bytes that the planner expects blocks to keep on the device between the passes."""
    if plan.offloads_activations:
        return 0.0
    sheet = context.sheet(plan)
    return samples * float(sheet.over_modes(sheet.kept_bytes)[0])


def accelerator() -> Cluster:
    """Return one accelerator of the catalog: budgets weigh bytes against time on the device that is planned for."""
    entry = find_entry("h100-sxm")
    return Cluster(
        published_device(entry), 1, 1, published_links(entry), published_price(entry), published_watts(entry),
        Figure(float("nan"), "unknown"),
    )  # fmt: skip


def main() -> None:
    """Print the table, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--json", type=Path, help="write the result to this file too")
    options = parser.parse_args()
    size: dict[str, Any] = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 128} if options.quick else {}
    spec = dataclasses.replace(ModelSpec("llama-1m" if options.quick else "llama-11m", vocab=256), **size)
    seq_len, samples = (64, 2) if options.quick else (512, 4)
    result: dict[str, Any] = {"machine": machine(), "model": spec.name, "seq_len": seq_len, "samples": samples}
    result["rows"] = rows(spec, seq_len, samples)
    print(f"{spec.name}, {samples} samples of {seq_len} tokens, bf16; over a step without recompute\n")
    print("| recompute | kept between the passes | the planner's figure | FLOPs of a step |\n|---|---|---|---|")
    for row in result["rows"]:
        print(f"| {row['choice']} | {row['kept']:.0%} | {row['forecast_kept']:.0%} | {row['computed']:.0%} |")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
