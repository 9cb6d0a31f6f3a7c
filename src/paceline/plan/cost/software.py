"""What the program that carries out a plan does that the plan does not say: conventions that prices depend on.

A plan is priced for Paceline's own run unless told otherwise. Tables of others were measured with other programs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    fused: bool = True  # whether activations, rotary positions and the loss are fused kernels, as profiles count them
    keeps_gathered: bool = True  # whether inputs gathered over tp are kept for backward, instead of gathered again
    first_flash: bool = False  # whether fused attention is that of before FlashAttention-2
    hides_context: bool = False  # whether keys of other ranks arrive while attention computes on those that are there
    gradient_bytes: int = 4  # of a gradient that is kept and summed up
    reduce_bytes: int = 4  # of a gradient that is reduced over devices
    overlaps: bool = True  # whether communication of the data axes runs beside forward and backward
    hides_tensor: bool = False  # whether tensor collectives run in pieces beside the products that they feed
    hides_sends: bool = False  # whether an interleaved pipeline sends while it computes other chunks
    routes_parts: bool = False  # whether tensor ranks each route their part of the sequence, instead of all of it alike
    sends_once_per_node: bool = False  # whether a token goes to a node once, however many of its experts are there
    pipeline_waits: bool = False  # whether tensor collectives wait for each other's ranks where there is a pipeline
    flushes: bool = False  # whether micro-batches empty the allocator's cache where it would outgrow the device


PACELINE = Software("Paceline")
FSDP = Software("PyTorch FSDP", reduce_bytes=2)
LLM_FOUNDRY = Software("LLM Foundry", reduce_bytes=2, first_flash=True)
MEGATRON = Software(
    "Megatron-LM",
    master_weights=True,
    selective_is_attention=True,
    fuses_gradient_sums=True,
    hides_context=True,
    routes_parts=True,
    keeps_gathered=False,
    hides_sends=True,
)
# Its recipes: gradients reduced in bf16, tensor collectives through user buffers, experts reached through DeepEP.
NEMO = replace(MEGATRON, name="NeMo", gradient_bytes=2, reduce_bytes=2, hides_tensor=True, sends_once_per_node=True)
INTERNEVO = replace(MEGATRON, name="InternEvo", gradient_bytes=2, reduce_bytes=2)  # gradients stay in bf16
# In 2021 and 2022, when tables were in fp16: gradients of 2 bytes, reduced after the last backward pass.
EARLY_MEGATRON = replace(
    MEGATRON, name="Megatron-LM, 2021", gradient_bytes=2, reduce_bytes=2, overlaps=False, hides_sends=False
)
NANOTRON = Software(
    "Nanotron", master_weights=True, fused=False, keeps_gathered=False, overlaps=False, pipeline_waits=True,
    flushes=True,
)  # fmt: skip
