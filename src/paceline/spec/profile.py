"""ModelProfile: a model as a chain of named blocks. All that the planner knows of a model.

Counts are per sample (one sequence, one image) and for the forward pass; a FLOP is one multiply or one add. The
backward pass does twice the matrix FLOPs of the forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

# Elements that routing moves for each that is sent to an expert: the row is copied to its expert's place and its result
# back, each read and written, and results are read to be added up. Grouped kernels serve all experts at once.
ROUTING_MOVES = 5


TRY = "; try "  # in the reason why an axis is closed: what opens the axis stands behind it


@dataclass(frozen=True)
class BlockProfile:
    """One block of the chain.

    `saved_elements` and `saved_fp32_elements` are what the forward pass keeps for the backward pass without
    recompute, in the compute dtype and always in fp32; `selective_elements` is the same with selective
    recompute, `input_elements` with full recompute (only the block's input is kept).
    `moved_elements` are elements that operators other than matrix products read and write.
    """

    name: str
    kind: str  # "embedding", "decoder", "experts", "norm", "head", "module"
    parameters: int
    matmul_flops: float
    attention_flops: float
    moved_elements: float
    saved_elements: float
    saved_fp32_elements: float
    selective_elements: float
    input_elements: float
    transient_elements: float  # largest short-lived buffers of the block, in fp32 elements
    operators: int  # operator launches in one forward pass
    # Geometric mean of the inner and outer width of its products; with `routed_flops`, of those that are not routed.
    matmul_width: int
    recomputable: bool = False  # whether activation checkpointing applies to the block
    open_axes: tuple[str, ...] = ("dp_replicate", "dp_shard")
    tied_to: str = ""  # the block that owns this block's shared weight, which is not counted here
    transient_cap_elements: float = 0.0  # what the transient never exceeds, whatever the micro-batch (0: no cap)
    kv_elements: float = 0.0  # keys and values that attention reads; part of `saved_elements`
    fused_attention: bool = True  # in one kernel that never writes its scores; else they are computed whole and moved
    heads: int = 0  # attention heads, and those of keys and values; 0: no attention, or unknown
    kv_heads: int = 0
    fixed_elements: float = 0.0  # fp32 buffers from forward to backward whose size no micro-batch changes
    experts: int = 0  # of a mixture of experts; 0 for every other block
    expert_parameters: int = 0  # those of the parameters that lie in experts, which `ep` spreads
    active_parameters: int = 0  # parameters that one token passes (0: all)
    expert_widths: tuple[int, ...] = ()  # of an expert's matrices: that of the stream, and its own, which `tp` splits
    attention_out_elements: float = 0.0  # output of attention that selective recompute keeps; in `selective_elements`
    routed_elements: float = 0.0  # elements of a sample that are sent to experts, once for each that a token passes
    frozen_parameters: int = 0  # those that are not trained: they have no gradient and no optimizer state
    forward_only_parameters: int = 0  # those of the frozen ones whose model has no backward pass: a teacher's
    narrow_parameters: int = 0  # those of the frozen ones that rest in two bytes
    packed_parameters: int = 0  # frozen weights in four bits: no parameters, whole, or spread over data ranks
    packed_layers: int = 0  # how many layers have them
    unpacked_elements: int = 0  # those of the largest layer of them, which are unpacked to compute with it
    unpacks: float = 0.0  # how often a micro-batch unpacks each of them, in forward and backward pass
    unpacks_again: float = 0.0  # how often more where the block is computed again
    routed_flops: float = 0.0  # those of `matmul_flops` that are products of routed experts; 0: all of them
    routed_groups: tuple[int, ...] = ()  # groups that experts stand in, and to how many of them a token goes at most
    largest_weight: int = 0  # parameters of the largest of its matrices that lie in no expert; 0: not told
    last_flops: float = 0.0  # those of `matmul_flops` of the block's last product, where nothing after it keeps a value
    # Those of `matmul_flops` of products whose operands keep them off a GPU's matrix units in precisions of two bytes:
    # in the forward pass, and in every product of the backward pass (task/profile/aligned.py).
    unaligned_flops: float = 0.0
    unaligned_backward_flops: float = 0.0
    backward_products: float = 2.0  # of the backward pass, for each product of the forward pass; frozen weights: 1
    plain_operators: int = 0  # those of `operators` that are started as often whatever kernels a program has fused

    @property
    def routed_width(self) -> float:
        """The geometric mean of the widths of a routed expert's products; that of all where they are not told apart."""
        if not self.routed_flops:
            return self.matmul_width
        return math.exp(sum(map(math.log, self.expert_widths)) / len(self.expert_widths))


@dataclass(frozen=True)
class TensorLimits:
    """What the degree of the tensor axis must respect in a model whose rules open it."""

    counts: dict[str, int] = field(default_factory=dict)  # what it must divide, by name: heads, say
    splits: tuple[int, ...] = ()  # dimensions of weights that are split: every rank must have some of each
    widths: tuple[int, ...] = ()  # second dimensions of weights whose first is split: dp_shard * cp divides them
    splits_sequence: bool = False  # whether it must divide a sample's positions


@dataclass(frozen=True)
class Fill:
    """How full batches of rows of different lengths are, against `samples` of a profile's rows each, as planned.

    `samples` are those of the rank with the largest part of a batch. `tokens` and `pairs` are the parts of their
    positions, and of pairs of positions in one row, that the fullest of `ranks` data ranks computes, filled-up ones
    among them, where it takes `micro_batch` samples at once. `passes` is the part of its `samples / micro_batch`
    passes, None where as many are made as planned.
    Example: of 4 rows of 512 tokens on one rank, 7 of about 270 come: tokens 0.92, pairs 0.49.
    """

    micro_batch: int
    tokens: float
    pairs: float
    passes: float | None
    ranks: int = 1


@dataclass(frozen=True)
class ModelProfile:
    """A chain of blocks, in the order in which a sample passes them."""

    name: str
    blocks: tuple[BlockProfile, ...]
    tokens_per_sample: int  # items the loss counts per sample at most: sequence length, or 1
    source: str  # "analytic", "traced", or "estimated" from the weights alone, of which `note` says why
    closed_axes: dict[str, str] | None = None  # axis -> why it is closed and which rule would open it
    tensor_limits: TensorLimits | None = None
    note: str = ""  # what a reader of the forecast must know of the profile
    remarks: tuple[str, ...] = ()  # what of the model or the batch has no effect
    drawing: tuple[str, ...] = ()  # the blocks that draw random numbers, by name
    grouped: tuple[str, ...] = ()  # the blocks with convolutions in groups, by name
    # Whether tokens see a part of their row alone, by a mask: ranks that share the row then keep all of its keys.
    masked: bool = False
    # Whether its loss is known to be a sum over rows. Of any other that is proven first, where a batch is to be cut.
    summed: bool = False
    # By rising ranks, and of each by rising micro-batch; none where every row is as long as a sample.
    fills: tuple[Fill, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """The number of parameters, shared ones counted once."""
        return sum(block.parameters for block in self.blocks)

    @cached_property
    def trained_parameters(self) -> int:
        """The number of parameters that are trained."""
        return self.parameters - sum(block.frozen_parameters for block in self.blocks)

    @cached_property
    def shapes(self) -> tuple[BlockProfile, ...]:
        """The different blocks of the chain, each once, without a name."""
        return tuple(dict.fromkeys(replace(block, name="") for block in self.blocks))

    @cached_property
    def repeated_blocks(self) -> int:
        """The number of repeated blocks: what activation checkpointing and pipeline stages are made of."""
        return sum(block.recomputable for block in self.blocks)

    @property
    def forward_only_parameters(self) -> int:
        """The number of parameters of models that only go forward: a teacher, a reference."""
        return sum(block.forward_only_parameters for block in self.blocks)

    @cached_property
    def packed_parameters(self) -> int:
        """The number of frozen weights in four bits."""
        return sum(block.packed_parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token passes: all but the experts that it is not sent to."""
        return sum(block.active_parameters or block.parameters for block in self.blocks)

    @property
    def expert_parameters(self) -> int:
        """The number of parameters in experts."""
        return sum(block.expert_parameters for block in self.blocks)

    @property
    def experts(self) -> int:
        """The number of experts of a layer, 0 for a model without."""
        return max(block.experts for block in self.blocks)

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """The widths of an expert's matrices: that of the stream, and its own, which `tp` splits."""
        return next((block.expert_widths for block in self.blocks if block.expert_widths), ())

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one sample's forward pass: products with weights plus attention as computed (causal half)."""
        return sum(block.matmul_flops + block.attention_flops for block in self.blocks)

    @cached_property
    def spared_flops(self) -> float:
        """FLOPs of one sample that frozen weights spare: their gradients, and passes before all that is trained."""
        return sum(block.matmul_flops * (2 - block.backward_products) for block in self.blocks)
