"""The calibration step of a probe: forward, backward and update of a small decoder block in plain torch.

A sum of measured parts misses what happens between them (allocation, caches, autograd's bookkeeping). Comparing the
forecaster's own sum for this block with the measured time tells by how much, per precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.cluster.probe.rank import Rank
from paceline.cluster.probe.records import PassTimes, TimedBlock

FEW_TOKENS = 8
ROUNDS = 7  # of passes on a few tokens, all rows and half of them
PASSES_OF_A_STEP = 3  # over a block's operators: one forward, and two for what backward has


def build_block(hidden: int, ffn: int, heads: int, layers: int, device: torch.device) -> nn.Module:
    """Return `layers` decoder layers (RMSNorm, causal attention, SwiGLU) with fp32 weights."""
    import torch
    from torch import nn
    from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {
                "qkv": (3 * hidden, hidden),
                "out": (hidden, hidden),
                "up": (2 * ffn, hidden),
                "down": (hidden, ffn),
            }
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.randn(shape, device=device) * 0.02))
            for name in ("norm1", "norm2"):
                self.register_parameter(name, nn.Parameter(torch.ones(hidden, device=device)))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [rows, sequence, hidden]
            weight = {name: value.to(inputs.dtype) for name, value in self.named_parameters()}
            rows, sequence, _ = inputs.shape
            normed = rms_norm(inputs.float(), (hidden,)).to(inputs.dtype) * weight["norm1"]
            query, key, value = (
                linear(normed, weight["qkv"]).view(rows, sequence, 3 * heads, -1).transpose(1, 2).chunk(3, 1)
            )
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
            inputs = inputs + linear(mixed.transpose(1, 2).reshape(rows, sequence, hidden), weight["out"])
            normed = rms_norm(inputs.float(), (hidden,)).to(inputs.dtype) * weight["norm2"]
            gate, up = linear(normed, weight["up"]).chunk(2, -1)
            return inputs + linear(silu(gate) * up, weight["down"])

    return nn.Sequential(*(Layer() for _ in range(layers)))


def count_operators(module: nn.Module, inputs: torch.Tensor) -> tuple[int, int]:
    """Return how many operators a forward pass launches, and the elements moved by operators that are no products.

    Views launch nothing. Matrix products and attention move what their FLOPs already pay for.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = ("mm", "bmm", "addmm", "linear", "attention")
    counts = [0, 0]

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if func.is_view or name in ("_unsafe_view", "detach"):
                return result
            counts[0] += 1
            if not any(product in name for product in products):
                outputs = result if isinstance(result, tuple) else (result,)
                counts[1] += sum(item.numel() for item in (*args, *outputs) if isinstance(item, torch.Tensor))
            return result

    with torch.no_grad(), Counter():
        module(inputs)
    return counts[0], counts[1]


def training_step(module: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    """Return a call that makes one training step of a module: forward, backward, update."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        module(inputs).float().square().mean().backward()
        optimizer.step()

    return step


def passes_by_rows(rank: Rank, block: tuple[int, int, int, int, int], layers: int) -> PassTimes:
    """Return the seconds of forward and backward of a block for each operator: on a few tokens, all rows, half of them.

    What is left of the last two on no rows is what a step pays for an operator whatever its size: Python and autograd,
    memory that is asked for, threads that are woken and waited for. Example: 30 ms on 8 rows and 17 on 4 leave 4, which
    are 32 us for each of 3 x 42 operators. They take turns: a half of 25 ms, in a slow moment of the host's, would
    leave 20 of the 30, and so 159 us. On a few tokens no thread is woken, and hardly anything else is paid. With one
    thread that is all, and a difference of long steps would say no more, less surely.
    """
    import torch

    hidden, ffn, heads, rows, sequence = block
    module = build_block(hidden, ffn, heads, layers, rank.device)
    operators: list[int] = []

    def passes_on(*size: int) -> Callable[[], None]:
        inputs = torch.randn(*size, hidden, device=rank.device)
        operators.append(count_operators(module, inputs)[0])

        def passes() -> None:
            for parameter in module.parameters():
                parameter.grad = None
            module(inputs).square().mean().backward()

        return passes

    sizes = [(1, FEW_TOKENS), (rows, sequence), (rows // 2, sequence)][: 1 if rank.threads == 1 else 3]
    took = rank.in_turns([passes_on(*size) for size in sizes], ROUNDS)
    for timed, count in zip(took, operators, strict=True):
        timed["seconds"] /= PASSES_OF_A_STEP * count
    few, *by_rows = took
    return {"few_tokens": few, "all_and_half": (by_rows[0], by_rows[1]) if by_rows else None}


def block_times(
    rank: Rank, blocks: tuple[tuple[int, int, int, int, int], ...], layers: int, dtypes: dict[str, str]
) -> list[TimedBlock]:
    """Return one record per precision and size: seconds of a training step and the counts that explain it."""
    import torch

    records: list[TimedBlock] = []
    for hidden, ffn, heads, rows, sequence in blocks:
        for precision, dtype in dtypes.items():
            inputs = torch.randn(rows, sequence, hidden, device=rank.device).to(getattr(torch, dtype))
            module = build_block(hidden, ffn, heads, layers, rank.device)
            operators, moved = count_operators(module, inputs)
            step = training_step(module, inputs)
            measured = rank.time(step)
            tokens, matrices = rows * sequence, 4 * hidden**2 + 3 * hidden * ffn
            records.append({
                "precision": precision,
                "width": round((matrices / (4 + 3)) ** 0.5),  # geometric mean of an average product
                "head_width": hidden // heads,
                "sequence": sequence,
                "parameters": layers * (matrices + 2 * hidden),
                "matmul_flops": 2.0 * tokens * layers * matrices,
                "attention_flops": 2.0 * tokens * sequence * hidden * layers,  # 4 s h per token, causal half
                "moved_elements": moved,
                "operators": operators,
                **measured,
            })  # fmt: skip
    return records
