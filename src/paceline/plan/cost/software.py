"""What the program that carries out a plan does that the plan does not say: conventions that prices depend on.

A plan is priced for Paceline's own run unless told otherwise. Tables of others were measured with other programs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Software:
    """Conventions of a training program."""

    name: str
    guessed: bool = False  # whether these are taken for a program that nothing is known of
    pads_vocabulary: bool = False  # whether the head's width is padded to what matrix units ask for
    sequence_parallel: bool = True  # whether tensor ranks share the sequence where they do not share matrices
    # 16-bit weights at rest, sharded in ZeRO-3 alone, beside fp32 masters that are part of the optimizer's state.
    # Otherwise fp32 weights are cast, and sharded in every class, as FSDP2 does.
    master_weights: bool = False
    # Whether recompute ends where all that the backward pass needs is there again, so before a block's last product.
    # torch's `checkpoint` does without `use_reentrant` (its early stop), and compilers leave out what nothing reads.
    stops_early: bool = True
    selective_is_attention: bool = False  # selective recompute repeats attention's core alone, else all but products
    selective_products: float = 1.0  # part of the products whose outputs selective recompute keeps, else
    selective_grouped: bool = True  # whether it keeps what grouped products give, those of routed experts, as others
    selective_blocks: bool = False  # whether it is full recompute of some blocks instead, how many is not told
    fuses_gradient_sums: bool = False  # whether products of weight gradients add to what earlier micro-batches left
    fused: bool = True  # whether activations, rotary positions and the loss are fused kernels, as profiles count them
    engine_layers: bool = False  # whether blocks are layers of Transformer Engine, which take a host longer to start
    splits_root: bool = False  # whether embedding and head are units of sharding of their own
    gathers_weights: bool = False  # whether every matrix is a unit of its own, reduced in the compute dtype
    live_parameters: float = 0.0  # gathered at once in ZeRO-3 at most, or one whole weight; 0: units of the model
    gathers_to_recompute: bool = False  # whether ZeRO-3 lets go of weights between computing again and backward
    selective_attention: bool = True  # whether selective recompute that keeps products keeps attention's output too
    # Whether compiled blocks whose products are kept are what torch's partitioner makes of them: it saves no result
    # that no gradient reads, as a block's last product, and values between products live inside of kernels.
    partitions: bool = False
    selective_collectives: bool = True  # whether it repeats tensor collectives, where it is not attention's core alone
    selective_routes: bool = True  # and whether it sends tokens to experts again
    selective_sums: bool = False  # whether selective recompute keeps what tensor ranks have summed up
    logit_share: float = 0.0  # of fp32's 4 bytes, for a logit in forward and again in backward; 0: by `fused`
    fuses_compiled: bool = False  # whether kernels are fused in compiled plans alone
    fuses_unless_told: bool = False  # whether they are but in rows that say that nothing was compiled
    takes_modules: bool = False  # whether models are modules of Transformers, where they are Llamas
    splits_by_dtensor: bool = False  # whether operators of tensor ranks are on DTensors, unless compiled
    gathers_fp8: bool = False  # whether fp8 plans gather weights in fp8
    recipe: str = ""  # of fp8, a name of plan/cost/programs/low.py
    keeps_gathered: bool = True  # whether inputs gathered over tp are kept for backward, instead of gathered again
    hides_second_gather: bool = False  # whether those come while gradients of inputs are computed
    hides_input_sums: bool = False  # whether sums of inputs' gradients run while gradients of weights are computed
    first_flash: bool = False  # whether fused attention is that of before FlashAttention-2
    cudnn_attention: bool = False  # whether fused attention is cuDNN's, which is made for Hopper as others are not
    tunes_texts: int = 0  # tokens of the texts that rows of its own recipes of fine-tuning are packed of; 0: not known
    adapts_inputs: bool = False  # whether its adapters are beside attention's first product alone, unless it is told
    fourth_flash: bool = False  # whether fused attention is FlashAttention-4, which is made for Blackwell
    hides_context: bool = False  # whether keys of other ranks arrive while attention computes on those that are there
    # Whether ranks of cp exchange keys and values repeated to as many heads as queries have, gathered once beside the
    # attention to their own, and whether the gradients of these go around beside the attention of the next ones.
    rings_repeated: bool = False
    weight_bytes: int = 0  # of an updated weight that no wider one stands beside, and of its gradient; 0: as the state
    moment_bytes: int = 0  # of a value that an optimizer keeps for a weight; 0: as the state
    gradient_bytes: int = 4  # of a gradient that is kept and summed up
    sums_after_backward: bool = False  # whether a backward pass leaves all gradients in 16 bits before they are summed
    # Whether an update makes a rank's part of 16-bit gradients flat, and casts it to fp32, before it lets go of either.
    flattens_gradients: bool = False
    reduce_bucket: float = 0.0  # values of a buffer that 16-bit gradients are reduced in, whatever the model's size
    fills_bucket: bool = False  # whether ZeRO has that buffer whatever gradients are kept in
    copies_to_buckets: bool = False  # whether whole copies have all their gradients once more in buckets
    roots_at_once: bool = False  # whether an update has the roots of all second moments at once
    reduce_bytes: int = 4  # of a gradient that is reduced over devices
    bucket_parameters: float = 0.0  # of a collective of sharded state at least; 0: a unit of the model at a time
    broadcasts_shards: bool = False  # whether every rank broadcasts the weights that it updated, instead of a gather
    overlaps: bool = True  # whether communication of the data axes runs beside forward and backward
    hides_tensor: bool = False  # whether tensor collectives run in pieces beside the products that they feed
    overlaps_with_te: bool = False  # whether tensor collectives are hidden so where layers are Transformer Engine's
    hides_sends: bool = False  # whether an interleaved pipeline sends while it computes other chunks
    routes_parts: bool = False  # whether tensor ranks each route their part of the sequence, instead of all of it alike
    sends_once_per_node: bool = False  # whether a token goes to a node once, however many of its experts are there
    # Whether pipelines gather ZeRO-3's weights once a step, and reduce its gradients once, as class 1 does.
    gathers_once_in_pipelines: bool = False
    micro_batch_per_stage: bool = False  # whether pipelines cut a batch into as many micro-batches as they have stages
    interleaves: bool = False  # whether its pipelines may hold several stages per device
    interleaved_stages: int = 0  # per device, of those that interleave unless told otherwise; 0: any number
    hides_experts: bool = False  # whether interleaved pipelines route between nodes while they compute other samples
    captured: bool = (
        False  # whether a step of a mixture is one graph: no launches, and routing hidden inside a node too
    )
    pipeline_waits: bool = False  # whether tensor collectives wait for each other's ranks where there is a pipeline
    flushes: bool = False  # whether micro-batches empty the allocator's cache where it would outgrow the device
    half_in_fp16: bool = False  # whether gradients are kept and reduced in 2 bytes where training is in fp16
    spreads_experts: bool = False  # whether tensor ranks hold whole experts of their own, instead of parts of all
    reduces_once: bool = False  # whether ZeRO-2 sums up a step's micro-batches before it reduces
    sums_whole: bool = False  # whether every class of ZeRO does, so that each rank holds whole gradients meanwhile
    rests_activations: bool = False  # whether plans of ZeRO-3 may leave activations in host memory where none says so
    fills_stages: bool = False  # whether pipelines fill stage after stage by cost; else layers are dealt out evenly
    memory_rank: str = ""  # whose memory it writes down, the "first" or "last" pipeline rank's; else the fullest's
    fuses_attention: bool = True  # whether attention of GPT shapes is fused unless it is asked to be otherwise
    drops_attention: bool = True  # whether attention that is not fused drops scores out, as GPT shapes of its time did
    recomputes: tuple[str, ...] = ()  # modes of recompute that it may run where a table does not say; (): any
    classes: tuple[int, ...] = ()  # ZeRO classes that it may run where a table does not say; 0: whole copies

    @property
    def routes_whole(self) -> bool:
        """Whether tensor ranks with a part of every expert each send all tokens to experts and take them back."""
        return not (self.routes_parts or self.spreads_experts)


PACELINE = Software("Paceline", partitions=True)
