"""One rank of a probe: a child process that measures a device while its peers measure other devices.

`python -m paceline.cluster.probe.worker REQUEST.json RANK` writes RESULT-RANK.json beside the request, and ends with
the process that has started it: it would take cores that nobody knows of. All ranks
measure the same thing at the same time, so the contention for memory and cores that training meets is in the figures.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cluster.here.imported import OWN_BYTES, TORCH_OF_A_RANK
from paceline.cluster.probe.block import block_times, passes_by_rows
from paceline.cluster.probe.collectives import collective_times, refused_of
from paceline.cluster.probe.passes import faster, fastest
from paceline.cluster.probe.rank import Rank
from paceline.cluster.probe.records import (
    LaunchTimes,
    MemoryTimes,
    ProbePass,
    ProbeRequest,
    RankProbe,
    TimedBytes,
    TimedRate,
)
from paceline.cluster.probe.units import step_times
from paceline.spec.cluster import FUSED_ADAMW_BYTES
from paceline.system.end_of_parent import PARENT_VARIABLE, signal_at_end_of

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
CPU_WIDTHS = (64, 128, 256, 512, 1024)
CUDA_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
CPU_ROWS, CUDA_ROWS = 1024, 8192
CPU_SEQUENCES: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
CUDA_SEQUENCES: tuple[int, ...] = (512, 2048, 8192)
HEAD_WIDTHS = {"cpu": (64, 32), "cuda": (128, 64)}  # of attention, the second timed at fewer sequences
LONGEST_FP64 = {"cpu": CPU_ROWS, "cuda": 2048}  # of attention: longer ones take seconds, and nobody trains on them
NARROW_SEQUENCES = {"cpu": (128, 512, 1024, 2048), "cuda": (2048, 8192)}
HOPELESS = 4  # a precision so many times slower than fp32 is measured at the smallest widths only
# (hidden, ffn, heads, rows, sequence): a cache-resident block and one that is not.
CPU_BLOCKS = ((128, 384, 4, 8, 128), (384, 1024, 6, 2, 256))
CUDA_BLOCKS = ((1024, 2816, 16, 4, 2048), (2048, 5632, 16, 4, 2048))
BLOCK_LAYERS = 2
PICKED_ROWS, PICKED_WIDTH = 2048, 256  # of a few thousand tokens of a small mixture
# Elements of each of 8 updated tensors. An H200's update of 2**19 each takes 70 us, which its host needs to start it.
UPDATED, CUDA_UPDATED = 2**19, 2**24


def operand(rank: Rank, shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    """Return a tensor to compute with: of ones on a CPU, elsewhere of random numbers.

    A chip's power goes with the bits that flip (Weste & Harris 2011, CMOS VLSI Design, section 5.2), and of a constant
    hardly any do: an accelerator would keep a clock in products of ones that no training sees.
    """
    import torch

    if rank.kind == "cpu":
        return torch.ones(shape, dtype=getattr(torch, dtype), device=rank.device)
    return torch.randn(shape, device=rank.device).to(getattr(torch, dtype))


def matmul_rates(rank: Rank, dtypes: dict[str, str]) -> dict[str, list[TimedRate]]:
    """Return per precision the rate of [rows, width] x [width, width] products, forward and backward."""
    import torch
    from torch.nn.functional import linear

    rows, all_widths = (CPU_ROWS, CPU_WIDTHS) if rank.kind == "cpu" else (CUDA_ROWS, CUDA_WIDTHS)
    rates: dict[str, list[TimedRate]] = {}
    widths = all_widths[:2] if rank.trial else all_widths
    for precision, name in dtypes.items():
        points: list[TimedRate] = []
        for width in widths:
            inputs, weight, gradient = (operand(rank, (size, width), name) for size in (rows, width, rows))
            inputs.requires_grad_(), weight.requires_grad_()

            def train(inputs: Any = inputs, weight: Any = weight, gradient: Any = gradient) -> None:
                torch.autograd.grad(linear(inputs, weight), (inputs, weight), gradient)

            measured = rank.time(train)
            points.append({"at": width, "flops": 6.0 * rows * width * width / measured["seconds"], **measured})
            reference = rates.get("fp32", points)[len(points) - 1]["flops"]
            if len(points) == 2 and rank.any(points[-1]["flops"] * HOPELESS < reference):
                break
        rates[precision] = points
    return rates


def attention_rates(rank: Rank, dtypes: dict[str, str], narrow: bool = False) -> dict[str, list[TimedRate]]:
    """Return per precision the rate of causal attention, forward and backward, at several sequence lengths.

    The backward pass is counted as 2.5 times the forward's 2 s^2 h (causal half), as FlashAttention-2 does it (Dao
    2023, arXiv:2307.08691). With `narrow`, that of heads of half the width, at fewer lengths: of a score the softmax
    costs the same however wide its head is (section 3.1 there), so narrow heads have fewer FLOPs in the same time.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    tokens, sequences = (CPU_ROWS, CPU_SEQUENCES) if rank.kind == "cpu" else (2 * CUDA_ROWS, CUDA_SEQUENCES)
    heads, head_width = 4 if rank.kind == "cpu" else 16, HEAD_WIDTHS[rank.kind][narrow]
    if narrow:
        heads, sequences = 2 * heads, NARROW_SEQUENCES[rank.kind]
    rates: dict[str, list[TimedRate]] = {}
    for precision, name in dtypes.items():
        rates[precision] = []
        for sequence in sequences[:1] if rank.trial else sequences:
            if name == "float64" and sequence > LONGEST_FP64[rank.kind]:
                continue
            shape = (max(1, tokens // sequence), heads if sequence <= tokens else heads // 2, sequence, head_width)
            heads_of = [
                torch.randn(shape, device=rank.device).to(getattr(torch, name)).requires_grad_() for _ in range(3)
            ]
            gradient = operand(rank, shape, name)

            def train(heads_of: Any = heads_of, gradient: Any = gradient) -> None:
                query, key, value = heads_of
                mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
                torch.autograd.grad(mixed, heads_of, gradient)

            measured = rank.time(train)
            flops = 3.5 * 2.0 * shape[0] * sequence**2 * shape[1] * head_width
            rates[precision].append({"at": sequence, "flops": flops / measured["seconds"], **measured})
    return rates


def memory_rates(rank: Rank) -> MemoryTimes:
    """Return bytes per second of a triad and of one elementwise operator with a new output, far beyond the caches.

    And of picking rows by index, as experts are sent theirs: bytes of the picked rows over forward and backward.
    """
    import torch

    elements = (16 if rank.kind == "cpu" else 256) * (2**14 if rank.trial else 2**20)
    first, second = (operand(rank, (elements,)) for _ in range(2))
    out = torch.empty_like(first)
    triad = rank.time(lambda: torch.add(first, second, alpha=3.0, out=out))
    elementwise = rank.time(lambda: torch.mul(first[: elements // 8], 1.5))
    shape = (PICKED_ROWS, PICKED_WIDTH)
    rows, gradient = operand(rank, shape).requires_grad_(), operand(rank, shape)
    order = torch.randperm(PICKED_ROWS, device=rank.device)
    picked = rank.time(lambda: torch.autograd.grad(rows[order], rows, gradient))
    return {
        "triad": {"bytes_per_second": 12.0 * elements / triad["seconds"], **triad},
        "elementwise": {"bytes_per_second": elements / elementwise["seconds"], **elementwise},
        "picked": {"bytes_per_second": 4.0 * PICKED_ROWS * PICKED_WIDTH / picked["seconds"], **picked},
    }


def launch_times(rank: Rank) -> LaunchTimes:
    """Return host seconds per tiny operator, without autograd and as a third of its forward and backward."""
    import torch

    tiny = torch.ones(8, device=rank.device)
    leaf = torch.ones(8, device=rank.device, requires_grad=True)
    chain = 50

    def chained() -> None:
        value = leaf
        for _ in range(chain):
            value = value * 1.0001
        value.sum().backward()

    with torch.no_grad():
        plain = rank.time(lambda: tiny.add(1.0))
    trained = rank.time(chained)
    return {"plain": plain, "autograd": {**trained, "seconds": trained["seconds"] / chain / 3}}


def optimizer_rate(rank: Rank) -> TimedBytes:
    """Return bytes per second of a fused AdamW step: FUSED_ADAMW_BYTES for each parameter."""
    import torch

    size = UPDATED if rank.kind == "cpu" or rank.trial else CUDA_UPDATED
    tensors = [torch.zeros(size, device=rank.device, requires_grad=True) for _ in range(8)]
    for tensor in tensors:
        tensor.grad = operand(rank, (size,))
    optimizer = torch.optim.AdamW(tensors, fused=True)
    measured = rank.time(optimizer.step)
    return {"bytes_per_second": FUSED_ADAMW_BYTES * 8 * size / measured["seconds"], **measured}


def warm_libraries(rank: Rank) -> None:
    """Load what a rank does: its modules, and what the first use of products, an update or a collective loads."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention

    is_counted = rank.kind == "cpu" and not rank.trial  # where what is imported is of the device's memory
    for module in TORCH_OF_A_RANK if is_counted else ("torch.distributed.fsdp",):
        import_module(module)
    for name in DTYPES.values():
        square = torch.ones(64, 64, device=rank.device, dtype=getattr(torch, name), requires_grad=True)
        heads = (square @ square).view(1, 1, 64, 64)
        scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()
    weight = torch.ones(64, device=rank.device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()
    dist.all_reduce(torch.ones(1, device=rank.device))


def resident_bytes(kind: str) -> int:
    """Return what this process holds as a run measures it (run/memory/spent.py).

    On a CPU that is resident memory without the pages of files, such as libraries, and what a rank's own modules add;
    on CUDA what the driver counts beyond torch's tensors.
    """
    if kind == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    told = {name: int(line.split()[1]) * 1024 for line in lines for name in ("VmRSS", "RssFile") if name + ":" in line}
    return max(0, told["VmRSS"] - told.get("RssFile", 0)) + OWN_BYTES if "VmRSS" in told else 0


def one_pass(rank: Rank, before: ProbePass | None = None) -> ProbePass:
    """Return every measurement once; those of precisions that `before` found hopeless are left out."""
    dtypes = {name: DTYPES[name] for name in (before["usable"] if before else DTYPES)}
    launch, collectives, steps = launch_times(rank), collective_times(rank), step_times(rank)
    if rank.kind == "cpu" and not rank.trial:  # beside an accelerator the host starts operators ahead of it
        launch["passes"] = passes_by_rows(rank, CPU_BLOCKS[0], BLOCK_LAYERS)
    begin_wall, begin_cpu = time.perf_counter(), time.process_time()
    matmul = matmul_rates(rank, dtypes)
    # A precision slower than fp32 (fp16 on most CPUs) is not worth timing; the forecaster takes fp32's calibration.
    rates = {name: points[-1]["flops"] for name, points in matmul.items() if len(points) == len(matmul["fp32"])}
    usable = before["usable"] if before else [
        name for name in ("fp32", "bf16", "fp16") if not rank.any(rates.get(name, 0.0) < rates["fp32"] / 1.5)
    ]  # fmt: skip
    blocks = (CPU_BLOCKS if rank.kind == "cpu" else CUDA_BLOCKS)[: 1 if rank.trial else 2]
    worth = {name: DTYPES[name] for name in usable}
    attention = attention_rates(rank, worth if before else {**worth, "fp64": DTYPES["fp64"]})
    found: ProbePass = {
        "launch": launch, "collectives": collectives, "steps": steps, "matmul": matmul, "attention": attention,
        "attention_narrow": attention_rates(rank, worth, narrow=True), "usable": usable,
        "blocks": block_times(rank, blocks, BLOCK_LAYERS, worth),
        "optimizer": optimizer_rate(rank), "memory": memory_rates(rank), "cpu_seconds": 0.0, "wall_seconds": 0.0,
    }  # fmt: skip
    if not rank.trial:  # every term is multiplied by what these steps take, so they are timed at two moments of a pass
        later = block_times(rank, blocks, BLOCK_LAYERS, worth)
        found["blocks"] = [faster(*pair) for pair in zip(found["blocks"], later, strict=True)]
    found["cpu_seconds"], found["wall_seconds"] = time.process_time() - begin_cpu, time.perf_counter() - begin_wall
    return found


def measure(request: ProbeRequest, rank: int, folder: Path) -> RankProbe:
    """Return all of one rank's measurements."""
    import torch
    import torch.distributed as dist

    here = Rank(request, rank, folder)
    warm_libraries(here)
    runtime_bytes = resident_bytes(here.kind)
    found = one_pass(here)
    for _ in range(request["passes"] - 1):
        found = fastest(found, one_pass(here, found))
    # All this is computing, so on CPUs a rank that got less than its cores shared them with somebody else.
    fair_seconds = found["wall_seconds"] * request["threads"] * request["fair_share"]
    result: RankProbe = {
        "torch": torch.__version__, "runtime_bytes": runtime_bytes, "launch": found["launch"],
        "collectives": found["collectives"], "steps": found["steps"], "matmul": found["matmul"],
        "attention": found["attention"], "attention_narrow": found["attention_narrow"],
        "head_widths": list(HEAD_WIDTHS[here.kind]), "blocks": found["blocks"], "optimizer": found["optimizer"],
        "memory": found["memory"], "core_share": found["cpu_seconds"] / fair_seconds,
        "refused": refused_of(found["collectives"]),
    }  # fmt: skip
    if here.kind == "cuda":
        result["device_name"] = torch.cuda.get_device_name()
        result["device_memory_bytes"] = torch.cuda.get_device_properties(rank).total_memory
    dist.barrier()
    dist.destroy_process_group()
    return result


def main() -> None:
    """Measure and write RESULT-RANK.json beside the request file."""
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    signal_at_end_of(int(os.environ.pop(PARENT_VARIABLE)), signal.SIGKILL)
    result = measure(json.loads(path.read_text("utf-8")), rank, path.parent)
    (path.parent / f"result-{rank}.json").write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main()
