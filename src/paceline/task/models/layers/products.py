"""The products of many experts, an expert's on the rows sent to it: a grouped kernel where there is one, or a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts flat choices by expert, int64 [choices], and how many each expert has, [experts].

    `torch.bincount` would have the host wait for the device, to know how many bins there are.
    """
    ordered, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(experts, device=chosen.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def expert_products(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return SwiGLU of each row by its expert, [tokens, hidden].

    `rows` [tokens, hidden] are sorted by expert, `counts` [experts] int64 says how many each has (none is allowed);
    `gate_up` is [experts, 2 x width, hidden] with the gate first, `down` [experts, hidden, width]. Rows behind those
    that `counts` add up to stand for none: what is returned for them is not to be read.
    """
    if has_grouped_products(rows, gate_up, down):
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    results = []
    sizes = counts.tolist()
    *parts, behind = rows.split([*sizes, len(rows) - sum(sizes)])
    for part, widen, narrow in zip(parts, gate_up.unbind(), down.unbind(), strict=True):
        gate, up = F.linear(part, widen).chunk(2, dim=-1)
        results.append(F.linear(F.silu(gate) * up, narrow))
    return torch.cat([*results, behind] if len(behind) else results)


def has_grouped_products(rows: Tensor, *weights: Tensor) -> bool:
    """Return whether torch's grouped kernel takes these: bf16 on CUDA from compute capability 8.0, aligned widths."""
    return (
        rows.is_cuda
        and hasattr(F, "grouped_mm")
        and all(tensor.dtype == torch.bfloat16 for tensor in (rows, *weights))
        and all(size % 8 == 0 for weight in weights for size in weight.shape[1:])  # rows of 16 bytes
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    )
