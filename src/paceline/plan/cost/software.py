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
    # 16-bit weights at rest, sharded in ZeRO-3 alone, beside fp32 masters that are part of the optimizer's state.
    # Otherwise fp32 weights are cast, and sharded in every class, as FSDP2 does.
    master_weights: bool = False
    selective_is_attention: bool = False  # selective recompute repeats attention's core alone, else all but products
    fuses_gradient_sums: bool = False  # whether products of weight gradients add to what earlier micro-batches left
    gradient_bytes: int = 4  # of a gradient that is kept and summed up
    reduce_bytes: int = 4  # of a gradient that is reduced over devices


PACELINE = Software("Paceline")
MEGATRON = Software("Megatron-LM", master_weights=True, selective_is_attention=True, fuses_gradient_sums=True)
