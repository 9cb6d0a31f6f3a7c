"""What the program that carries out a plan does that the plan does not say: conventions that prices depend on.

A plan is priced for Paceline's own run unless told otherwise. Tables of others were measured with other programs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Conventions of a training program."""

    name: str
    sequence_parallel: bool = True  # whether tensor ranks share the sequence where they do not share matrices
    master_weights: bool = False  # 16-bit weights and, sharded from ZeRO-1 on, fp32 masters; else fp32 weights are cast
    fused: bool = False  # whether norms, activations and softmax are single kernels
    gradient_bytes: int = 4  # of a gradient that is summed over micro-batches
    reduce_bytes: int = 4  # of a gradient that is summed over devices
    overlaps: bool = True  # whether communication of the data axes runs beside computing


PACELINE = Software("Paceline")
MEGATRON = Software("Megatron-LM", master_weights=True, fused=True)
