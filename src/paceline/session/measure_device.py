"""The process of one device that measures a task: `python -m paceline.session.measure_device REQUEST RESULT`.

REQUEST is a JSON file of {spec: file of the spec, plan: of one micro-batch on one device, threads, kind, seconds}. All
processes measure at once, as training uses them, each on a model of its own; rank 0 writes RESULT. What is timed is the
step that training makes, and each repeated block once more by itself, on the inputs that it had in that step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.launch.here import place_here
from paceline.launch.worker import guarded
from paceline.run.process.handover import take_over
from paceline.supervise.parent import end_with_parent

if TYPE_CHECKING:
    import torch

    from paceline.run.loop.loader import StepBatch
    from paceline.run.process.world import World
    from paceline.spec.plan import Plan
    from paceline.spec.task import Task
    from paceline.task.data.protocol import Source

LEAST, MOST = 5, 40  # repeats of anything that is timed


def main() -> int:
    """Measure and return the exit code."""
    end_with_parent()
    return guarded(lambda: _measure(Path(sys.argv[1]), Path(sys.argv[2])))


def _measure(request_path: Path, result_path: Path) -> None:
    import torch

    from paceline.run.assemble import assemble
    from paceline.run.process.world import World, join_world
    from paceline.spec.plan import plan_from_dict
    from paceline.task.data.source import open_sources
    from paceline.task.models.blocks import find_blocks

    request = json.loads(request_path.read_text())
    peers = join_world(request["kind"], threads=request["threads"], place=place_here(os.environ))
    task, plan = take_over(Path(request["spec"])).task, plan_from_dict(request["plan"])
    source, _ = open_sources(task.data, task.seed)
    alone = World(0, 1, peers.local_rank, peers.device)
    built = assemble(task, plan, alone, source, source.items_per_sample)
    batch, tokens, pairs = one_pass(task, plan, source, peers.device)
    blocks = [block for _, block in find_blocks(built.model)]
    calls: dict[int, tuple[object, object]] = {}
    hooks = [block.register_forward_pre_hook(_keep(calls, at), with_kwargs=True) for at, block in enumerate(blocks)]
    built.stepper.step(batch, lr=0.0)  # warms up, and shows what blocks are called with
    for hook in hooks:
        hook.remove()
    steps: list[dict[str, float]] = []

    def step() -> None:
        steps.append(built.stepper.step(batch, lr=0.0).seconds)

    def synchronise() -> None:
        if peers.device.type == "cuda":
            torch.cuda.synchronize(peers.device)

    calls_timed: list[Callable[[], object]] = [step, *(_passes(blocks[at], *calls[at]) for at in request["chosen"])]
    _, *blocks_timed = repeat(calls_timed, synchronise, request["seconds"], peers)
    passes = [one["forward_backward"] for one in steps[1:]]
    updates = [one["reduce"] + one["optimizer"] for one in steps[1:]]
    whole, update = lower_quartile(passes), lower_quartile(updates)
    alone_seconds = [lower_quartile(taken) for taken in blocks_timed]
    whole, update, *alone_seconds = peers.maximum([whole, update, *alone_seconds])
    deciles = statistics.quantiles(passes, n=10, method="inclusive")
    if peers.is_first:
        answer = {
            "whole_seconds": whole,
            "update_seconds": update,
            "block_seconds": alone_seconds,
            "parameters": sum(parameter.numel() for parameter in built.model.parameters() if parameter.requires_grad),
            "blocks": len(blocks),
            "repeats": len(passes),
            "spread": (deciles[-1] - deciles[0]) / statistics.median(passes),
            "tokens": tokens,
            "pairs": pairs,
        }
        result_path.write_text(json.dumps(answer))
    peers.wait()


def one_pass(task: Task, plan: Plan, source: Source, device: torch.device) -> tuple[StepBatch, float, float]:
    """Return rows that one device of a run passes at once, as most do, and how full they are.

    That is its positions, and the pairs of them in one row, over those of a micro-batch of the longest samples.
    """
    from paceline.run.loop.loader import BatchStream
    from paceline.task.data.order.budget import rows_of_task
    from paceline.task.data.order.lengths import multiple_of

    stream, rows = BatchStream(source, task.seed, plan, 0, device), rows_of_task(task, source, plan.batch_samples)
    if rows is None:
        return stream.at(0), 1.0, 1.0
    position, samples = rows.typical_pass(plan.micro_batch)
    full = rows.part_of(rows.lengths_at(position, samples), plan.micro_batch, multiple_of(stream.source))
    return stream.at(position, 1, samples, samples), *full


def repeat(
    calls: list[Callable[[], object]], synchronise: Callable[[], None], seconds: float, peers: World
) -> list[list[float]]:
    """Return the seconds of several rounds of these calls, as many on every rank, after a first one.

    The rounds fill about `seconds`. In a round every call runs once: other load on the machine then slows all calls
    alike, and the sum of some calls (the blocks) can be held against another call (the whole model).
    """

    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        synchronise()
        return time.perf_counter() - begin

    (once,) = peers.maximum([sum(timed(call) for call in calls)])
    rounds = [[timed(call) for call in calls] for _ in range(min(MOST, max(LEAST, math.floor(seconds / once))))]
    return [list(taken) for taken in zip(*rounds, strict=True)]


def lower_quartile(samples: list[float]) -> float:
    """Return the lower quartile: whatever else runs on the machine can only make a call slower."""
    return statistics.quantiles(samples, n=4, method="inclusive")[0]


def _keep(calls: dict[int, tuple[object, object]], at: int) -> Callable[..., None]:
    def hook(module: object, arguments: object, keywords: object) -> None:
        calls[at] = (arguments, keywords)

    return hook


def _passes(block: Any, arguments: Any, keywords: Any) -> Callable[[], None]:
    """Return a call of a block's forward and backward pass on copies of the inputs that it was called with."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def own(leaf: object) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copy = leaf.detach().clone()
        return copy.requires_grad_() if leaf.requires_grad else copy

    arguments, keywords = tree_map(own, arguments), tree_map(own, keywords)

    def call() -> None:
        outputs = block(*arguments, **keywords)
        found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        torch.autograd.backward(found, [torch.ones_like(leaf) for leaf in found])
        block.zero_grad(set_to_none=True)

    return call


def request_of(spec: Path, plan: Plan, chosen: list[int], kind: str, threads: int, seconds: float) -> dict[str, object]:
    """Return the request; `chosen` are the places of the repeated blocks that are timed by themselves."""
    return {"spec": str(spec), "plan": dataclasses.asdict(plan), "chosen": chosen, "kind": kind, "threads": threads,
            "seconds": seconds}  # fmt: skip


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
