"""Conventions of training programs by name, most with the option, function or paper that they are of.

Those places were named from knowledge of the programs; of their pages torchtitan's benchmarks were read again, and the
others were not. What the conventions are held to is the tables (docs/forecast-accuracy.md).

A name is what a table's `program` column holds. It is the only thing that conventions are looked up by: a table's file,
source and precision say nothing of the program. What a program does by default stands here; what it may do besides
(a ZeRO class, recompute, a micro-batch) is resolved row by row, backtest/layout.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.plan.cost.software import Software

# PyTorch's own loss in separate kernels: logits in bf16 and their log-probabilities; in backward as much again.
EAGER_LOGITS = 1.5
# Logits in 16 bits and one copy of them in fp32, in which the loss is computed in place, and in backward their gradient
# with its cast back to 16 bits: 2 + 4 B (`VocabParallelCrossEntropy` of core/tensor_parallel/cross_entropy.py of
# Megatron-LM, read 2026-11-27).
IN_PLACE_LOGITS = 0.75
# The same with another copy in fp32, 2 + 4 + 4 B: where the loss works on a clone of it ("cloning is required for
# backward hook" in mpu/cross_entropy.py of BigScience's Megatron-DeepSpeed), and where what is written in place is
# compiled together with what reads it, so that it gets a buffer of its own (a note in fusions/fused_cross_entropy.py of
# Megatron-LM on what it did before); both read 2026-11-27.
CLONED_LOGITS = 1.25
# A fused one: logits and their gradients in bf16 (`fused_crossentropy` of LLM Foundry, flash_attn.losses).
FUSED_LOGITS = 0.5

MEGATRON = Software(
    "Megatron-LM",
    pads_vocabulary=True,  # `--make-vocab-size-divisible-by`, 128 by default
    master_weights=True,
    stops_early=False,  # a function of its own runs the whole block again: core/tensor_parallel/random.py
    selective_is_attention=True,  # `--recompute-granularity selective` is core attention (Korthikanti et al. 2022)
    fuses_gradient_sums=True,  # `--no-gradient-accumulation-fusion` turns it off
    hides_context=True,
    routes_parts=True,
    keeps_gathered=False,  # saves the shard and gathers again in backward: core/tensor_parallel/layers.py
    hides_second_gather=True,  # the same function: `async_op=True`, before the gradient of the input
    hides_input_sums=True,  # and of the reduce-scatter of that gradient, before the gradient of the weight
    overlaps_with_te=True,
    hides_sends=True,  # `--no-overlap-p2p-communication` turns it off
    recipe="delayed",  # `--fp8-recipe` of Transformer Engine
    half_in_fp16=True,  # arguments.py sets `accumulate_allreduce_grads_in_fp32` with --bf16 alone
    bucket_parameters=40e6,  # max(40 million, 1 million x ranks) parameters: distributed_data_parallel_config.py
    reduces_once=True,  # gradients stay in one buffer until the last micro-batch: `no_sync` in schedules.py
    fuses_attention=False,  # `--use-flash-attn` must be asked for
    interleaves=True,  # `--num-layers-per-virtual-pipeline-stage`
    classes=(1, 0),  # `--use-distributed-optimizer`, or whole copies without it
    # `_set_tensorboard_writer` of training/global_vars.py: the last rank of the world alone has one (read 2026-11-25).
    memory_rank="last",
    logit_share=IN_PLACE_LOGITS,
)
# Its recipes: distributed optimizer, gradients reduced in bf16, tensor collectives through user buffers
# (`tp_comm_overlap`), attention of cuDNN or FlashAttention through Transformer Engine.
# Its recipes of fine-tuning pack SQuAD 1.1 ("the inputs are packed to 4096 tokens", its performance summary of 24.12;
# `packed_sequence = performance_mode` of recipes/llama3_8b.py of its 2.2, and `SquadDataModule`; read 2026-11-30), and
# attention stays in a text: a paragraph of 120 words, a question and an answer, about 200 tokens. Long texts have more
# of the tokens: a token's own text has 240 in the mean (assumed; 120 or 480 change a step of 8B by under 1 %).
SQUAD_TOKENS = 240
NEMO = replace(
    MEGATRON,
    name="NeMo",
    tunes_texts=SQUAD_TOKENS,
    adapts_inputs=True,  # `recipe.peft.target_modules = ['linear_qkv']`, the same files
    gradient_bytes=2,
    reduce_bytes=2,
    hides_tensor=True,
    fuses_attention=True,
    gathers_fp8=True,  # `fp8_param_gather` of its recipes but those of blocks: mixed_precision.py, read 2026-11-24
    classes=(1,),
    logit_share=0.0,  # its loss was not read
)
# Its recipes of mixtures (scripts/performance/configs, read again): `expert_tensor_parallel_size=1`, tokens sent
# through DeepEP, and `moe_a2a_overlap` where experts' groups leave the node, which needs an interleaved pipeline.
# Those of Qwen3 235B on H100 send by plain all-to-all, which no column of a table tells.
MEGATRON_BRIDGE = replace(
    NEMO, name="Megatron Bridge", spreads_experts=True, sends_once_per_node=True, hides_experts=True,
    tunes_texts=0, adapts_inputs=False,  # its recipes of fine-tuning were not read
    # Its containers' Transformer Engine gives "FusedAttention preference on Hopper+", which is cuDNN's
    # (get_attention_backend of dot_product_attention/utils.py, read 2026-11-28). In earlier versions those lines were
    # comments, and NeMo's own sequences of up to a million tokens of 2024 took as long as FlashAttention-2 takes.
    cudnn_attention=True,
    # Recipes of its FSDP rest activations of 5 to 40 layers on the host (`cpu_offloading_num_layers` of
    # scripts/performance/configs/llama/llama3_workload_base_configs.py, read 2026-11-28), and compute none again.
    rests_activations=True,
)  # fmt: skip
# On chips since GB200 its MXFP8 recipes of mixtures run a whole step as one CUDA graph and hide the all-to-all whatever
# the group (`_enable_hybridep_full_iteration_mxfp8` and `_enable_deepseek_full_iteration_mxfp8` of perf_recipes, read
# 2026-11-24; its releases before 26.06 did not).
CAPTURED_ON = ("GB200", "GB300", "B300")
# DeepSeek's own (DeepSeek-AI 2024, arXiv:2412.19437): tokens cross to a node once (section 3.2.2) while DualPipe has
# devices compute other micro-batches, on two chunks each (3.2.1), ZeRO-1 (3.2), operands of products in fp8 by
# blocks of 128 (3.3). Not one row of it is among the tables.
HAI_LLM = replace(
    MEGATRON, name="HAI-LLM", spreads_experts=True, sends_once_per_node=True, hides_experts=True,
    fuses_attention=True, recipe="blockwise", interleaved_stages=2, classes=(1,), logit_share=0.0,
)  # fmt: skip
# Gradients stay in bf16, and autograd adds them up; its images and install.md have FlashAttention 1.0.5. Ranks update
# whole tensors, and broadcast them one after the other (`broadcast_params` in hybrid_zero_optim.py). Both read again.
INTERNEVO = replace(
    MEGATRON, name="InternEvo", gradient_bytes=2, reduce_bytes=2, fuses_attention=True, fuses_gradient_sums=False,
    first_flash=True, broadcasts_shards=True, logit_share=0.0,
)  # fmt: skip
# Its pipeline engine has one stage per device (`PipelineModule` cuts the layers once for each), reduces after the last
# backward pass (`_exec_reduce_grads`), and sends between passes. Products
# are plain `F.linear`, whose gradients autograd adds up (megatron/mpu/layers.py of BigScience's, read again). In bf16
# the gradients of a backward pass stay in it until the pass has ended; then they are added to whole ones in fp32
# (`update_hp_grads` and `fp32_groups_gradients_flat` of runtime/bf16_optimizer.py, read 2026-11-24). Its ZeRO-3
# gathers the weights of a module at a time and ahead while fewer than `stage3_max_live_parameters` are there (1e9 by
# its configuration's page), a third time where a block is computed again (ZeRO-Infinity, arXiv:2104.07857, section
# 4.1). Gradients in fp16 are flattened at the update, this rank's part, and that is cast to fp32 while both stand
# (`step` of runtime/zero/stage_1_and_2.py), and they are reduced in a buffer of `reduce_bucket_size` values, 5e8 by its
# configuration's page (`ipg_buffer` of `reduce_gradients`); all read 2026-11-25.
MEGATRON_DEEPSPEED = replace(
    MEGATRON,
    name="Megatron-DeepSpeed",
    hides_second_gather=False,
    hides_input_sums=False,
    overlaps=False,
    hides_sends=False,
    fuses_gradient_sums=False,
    sums_after_backward=True,
    flattens_gradients=True,
    reduce_bucket=5e8,
    live_parameters=1e9,
    gathers_to_recompute=True,
    interleaves=False,
    logit_share=CLONED_LOGITS,
)
# ZeRO-2 and 3 of its own engine reduce in every backward pass, in the dtype that it trains in
# (`communication_data_type` of runtime/engine.py, read 2026-11-28); weights rest in 16 bits. The engine takes a module
# as it is: kernels of Megatron-LM's layers come with Megatron-DeepSpeed alone. ZeRO sets the buffer aside before
# it knows how many gradients there are (`ipg_buffer` of stage_1_and_2.py, `__ipg_bucket_flat_buffer` of stage3.py); its
# ZeRO-1 had none for years (`contiguous_gradients = False` of `_configure_zero_optimizer`), has it in the newest
# engine, and rows do not tell the version (read 2026-11-30).
DEEPSPEED = replace(
    MEGATRON_DEEPSPEED,
    name="DeepSpeed",
    fills_bucket=True,
    reduces_once=False,
    reduce_bytes=2,
    fused=False,
    takes_modules=True,
    classes=(1, 2, 3),
    logit_share=0.0,
)
# Tensor collectives in pieces beside products, sends and data-parallel traffic beside computing (Jiang et al. 2024,
# arXiv:2402.15627, section 3.2).
MEGASCALE = replace(MEGATRON, name="MegaScale", hides_tensor=True, fuses_attention=True, logit_share=0.0)
# Inputs are gathered again in backward (`tp_recompute_allgather`), beside the product that needs none of them
# (`tp_linear_async_communication`): both are on in the configurations of its benchmarks. The 16-bit gradients of a
# backward pass stand until it has ended (`FP32GradientAccumulator.backward` of its optim/gradient_accumulator.py), and
# stages are filled in order (`build_model` of its models/base.py); both read 2026-11-25. Rank 0 of the world, of the
# first stage, writes what it holds itself (`create_table_log` and `log_throughput` of its logging and utils, read that
# day).
NANOTRON = Software(
    "Nanotron", master_weights=True, fused=False, keeps_gathered=False, hides_second_gather=True, overlaps=False,
    pipeline_waits=True, sums_after_backward=True, flushes=True, classes=(0, 1), fills_stages=True,
    memory_rank="first",
)  # fmt: skip
# FullyShardedDataParallel with MixedPrecision in bf16, its reductions included; every backward pass reduces. Its
# `apply_activation_checkpointing` takes whole modules: what fms-fsdp calls `selective_checkpointing` is the part of the
# blocks that are computed again (fms_fsdp/config/training.py, read 2026-11-24).
# Its fp8 is torchao's, whose `convert_to_float8_training` scales whole tensors unless it is told otherwise.
FSDP = Software(
    "PyTorch FSDP", reduce_bytes=2, classes=(3,), selective_blocks=True, recipe="tensorwise", fuses_unless_told=True
)
# Its benchmarks ran on torch 1.13, whose `checkpoint` ran the whole block again; torch stops early since 2.1.
LLM_FOUNDRY = Software(
    "LLM Foundry", reduce_bytes=2, first_flash=True, stops_early=False, logit_share=FUSED_LOGITS, classes=(3,)
)
# MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32), torchtitan/config/job_config.py.
# Selective recompute keeps attention, every other product and results of reduce-scatters: `_get_custom_policy` and its
# list in activation_checkpoint.py. It
# shards tok_embeddings and [norm, output] apart: parallelize.py. Of fp8 its benchmarks gather weights in it
# (`enable_fsdp_float8_all_gather`), and their memory shows a loss that was not compiled.
TORCHTITAN = Software(
    "torchtitan",
    classes=(3,),
    selective_products=0.5,
    # `_op_sac_save_list` of its models' parallelize.py has `aten.mm`, attention, reduce-scatters and maxima, and no
    # `aten._grouped_mm`: of a mixture all that experts give is computed again (read 2026-11-28).
    selective_grouped=False,
    selective_sums=True,
    splits_root=True,
    logit_share=EAGER_LOGITS,
    fuses_compiled=True,
    # Norms by `SequenceParallel`, and products whose results stay DTensors (`use_local_output=False`): from memory of
    # its models' parallelize.py.
    splits_by_dtensor=True,
    gathers_fp8=True,
    recipe="tensorwise",
    interleaved_stages=2,  # `stages_per_rank = 1 if is_single_stage_schedule else 2`: distributed/pipeline_parallel.py
    # `reshard_after_forward = not pp_enabled` in apply_fsdp of parallelize.py; torch's stages reduce in the last
    # backward pass alone (`backward_maybe_with_nosync` of distributed/pipelining/stage.py).
    gathers_once_in_pipelines=True,
    micro_batch_per_stage=True,  # `pipeline_parallel_microbatches` unless it is given, in its releases until 2025
    # `repeat_kv` before scaled_dot_product_attention, which torch replaces by its ring (models/llama/model.py; torch's
    # distributed/tensor/experimental/_attention.py: `_AllGatherRotater`, and the gradients' rotater; read 2026-11-27).
    rings_repeated=True,
)
FSDP2 = Software(
    "PyTorch FSDP2", classes=(3,), splits_root=True, fuses_compiled=True, logit_share=EAGER_LOGITS, recipe="tensorwise"
)
# FSDP2 whose gradients are not reduced before a step's last micro-batch (`maybe_no_sync` of its training/grad.py, read
# 2026-11-27), and stay whole in fp32 until then.
KEMPNERFORGE = replace(FSDP2, name="KempnerForge", sums_whole=True)
# DistributedDataParallel: whole copies, reduced in fp32 in every backward pass, in buckets of their own unless it is
# told `gradient_as_bucket_view`. torch's AdamW goes over lists of tensors unless it is told `fused`: `_foreach_sqrt`
# of `_multi_tensor_adam` gives the roots of all second moments before one weight is updated (torch 2.13, both read
# 2026-11-30). Transformers' trainer asks for `fused` since torch 2.8, which a row has to say.
DDP = replace(FSDP2, name="PyTorch DDP", classes=(0,), fuses_compiled=True, copies_to_buckets=True, roots_at_once=True)
# It compiles the model with the loss in it (`model = torch.compile(model)` of train.py, whose forward pass returns the
# loss): logits in bf16, and their gradients; its AdamW is the fused one. From memory of it.
NANOGPT = replace(DDP, name="nanoGPT", logit_share=FUSED_LOGITS, roots_at_once=False)
# FSDP2 around layers of Transformer Engine, tokens sent through DeepEP (its performance summary, read 2026-11-24).
NEMO_AUTOMODEL = replace(
    FSDP2, name="NeMo Automodel", fuses_compiled=False, sends_once_per_node=True, recipe="current", cudnn_attention=True
)
# XLA gathers every weight by itself, in the compute dtype, and reduces its gradient in it. Of its policies of recompute
# `minimal` keeps products with weights, and not attention's output (`get_remat_policy` of layers/decoders.py: "save all
# except context", read 2026-11-24); what a block adds to the stream at its end is kept as the next block's input alone.
# Logits come in bf16 (`logits_dot_in_fp32` is false in base.yml) and are cast inside of the loss's kernels: 8B with a
# vocabulary of 128,256 ran on chips of 32 GB that logits in fp32 would fill (AI-Hypercomputer/tpu-recipes, v6e).
MAXTEXT = Software(
    "MaxText", reduce_bytes=2, classes=(3,), splits_root=True, recipe="delayed", gathers_weights=True,
    selective_attention=False, logit_share=FUSED_LOGITS,
    cudnn_attention=True,  # `attention: cudnn_flash_te` of its configurations for GPUs
)  # fmt: skip
# Layers of Pax are repeated, and repeated layers compute something again: `CHECKPOINT_POLICY` is SAVE_NOTHING in
# tasks/lm/model_params.py, and SAVE_DOT_WITH_NO_BATCH_DIM, which keeps products with weights alone, in its 5B
# (contrib/gpu/scripts_gpu/configs.py, read 2026-11-23). Its own attention is einsums; no dropout is set there but of
# inputs.
PAXML = replace(
    MAXTEXT, name="PaxML", fuses_attention=False, cudnn_attention=False, drops_attention=False,
    recomputes=("selective", "full"),
)  # fmt: skip

# What a table's `program` column may hold.
PROGRAMS = {
    "megatron-lm": MEGATRON,
    "nemo": NEMO,
    "megatron-bridge": MEGATRON_BRIDGE,
    "nemo-automodel": NEMO_AUTOMODEL,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "deepspeed": DEEPSPEED,
    "mist": MEGATRON,
    "internevo": INTERNEVO,
    "megascale": MEGASCALE,
    "hai-llm": HAI_LLM,
    "nanotron": NANOTRON,
    "pytorch-fsdp1": FSDP,
    "pytorch-fsdp2": FSDP2,
    "kempnerforge": KEMPNERFORGE,
    "torchtune": FSDP2,
    "litgpt": FSDP,
    "llm-foundry": LLM_FOUNDRY,
    "torchtitan": TORCHTITAN,
    "maxtext": MAXTEXT,
    "paxml": PAXML,
    # On the engine of another, as their own pages say.
    "megatron-core": MEGATRON,
    "primus": MEGATRON,
    "neuronx-distributed": MEGATRON,  # tensor and pipeline ranks as Megatron-LM has them, ZeRO-1
    "gpt-neox": MEGATRON_DEEPSPEED,
    "composer": LLM_FOUNDRY,
    "lingua": FSDP2,
    "olmo": FSDP,
    "olmo-core": FSDP2,
    "levanter": MAXTEXT,
    "axlearn": MAXTEXT,
    "t5x": MAXTEXT,
    # The same by other names.
    "megatron": MEGATRON,
    "mcore": MEGATRON,
    "nemo2": NEMO,
    "torch-titan": TORCHTITAN,
    "fsdp": FSDP,
    "fsdp1": FSDP,
    "fsdp2": FSDP2,
    "pytorch-fsdp": FSDP,
    "pytorch-ddp": DDP,
    "ddp": DDP,
    "nanogpt": NANOGPT,
}
MAKERS = re.compile(r"^(nvidia|amd|google|jax|meta|aws|habana|intel)-")
VERSION = re.compile(r"-v?\d+(\.\d+)*$")
# Programs that hold the name of the one whose engine they run, the longer names first: "Pai-Megatron-Patch".
ENGINES = ("torchtitan", "maxtext", "megatron-deepspeed", "megatron-bridge", "nemo-automodel", "llm-foundry",
           "nanotron", "deepspeed", "megatron", "nemo")  # fmt: skip
# They train modules of Hugging Face's transformers, whose kernels are separate, by DeepSpeed or FSDP.
AROUND_TRANSFORMERS = ("transformers", "trainer", "accelerate", "axolotl", "trl", "llama-factory", "unsloth", "optimum",
                       "xtuner", "ms-swift")  # fmt: skip


def with_modules(program: Software, modules: tuple[str, ...]) -> Software:
    """Return the conventions where selective recompute is of these modules, and not of attention's core.

    What products and attention give is kept then, as by torch's policies, and no collective is repeated; where a whole
    mixture is computed again, its experts' results are not, and tokens are sent to them again.

    Example: "norm, act" of Megatron-LM keeps the outputs of its products, and neither norms nor activations.
    """
    if not program.selective_is_attention or not modules or "core" in modules:
        return program
    whole = "experts" in modules
    return replace(
        program, selective_is_attention=False, selective_products=1.0, selective_collectives=False,
        selective_grouped=not whole, selective_routes=whole,
    )  # fmt: skip


def is_around_transformers(name: str) -> bool:
    """Return whether a program trains modules of Hugging Face's transformers as they are."""
    word = "-".join(name.lower().replace("_", " ").split())
    return word not in PROGRAMS and any(sign in word for sign in AROUND_TRANSFORMERS)


def program_of(name: str, sharding: str) -> tuple[Software, str]:
    """Return the conventions of a program, and what was assumed where it is not known: by how it shards its state."""
    word = "-".join(name.lower().replace("_", " ").split())
    for plain in (word, MAKERS.sub("", word), VERSION.sub("", MAKERS.sub("", word))):
        if plain in PROGRAMS:
            return PROGRAMS[plain], ""
    engine = next((engine for engine in ENGINES if engine in word), "")
    if engine:
        return PROGRAMS[engine], ""
    sharded = sharding.lower().startswith(("fsdp", "hsdp"))
    if any(sign in word for sign in AROUND_TRANSFORMERS):
        return replace(FSDP, fused=False) if sharded else DEEPSPEED, f"program {name} priced as modules of Transformers"
    # A stranger's loss is torch's own, in separate kernels, whatever else of its model is compiled.
    found = replace(FSDP, logit_share=EAGER_LOGITS) if sharded else MEGATRON
    return found, f"{f'program {name} priced' if name else 'no program stated: priced'} as {found.name}"
