"""All planted mistakes that a proof must catch, and the specs and layouts that they are planted in."""

from __future__ import annotations

import re
from dataclasses import dataclass

import planted
import planted_axes
import planted_beyond
import planted_experts
import planted_fresh
import planted_lines
import planted_low
import planted_met
import planted_odd
import planted_rare
import planted_splits
import planted_story
import planted_three
from planted import Planted, nothing

DECODER = 'name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48'
MOE = 'name = "moe-2m", hidden = 16, layers = 2, heads = 2, kv_heads = 2, ffn = 8, experts = 4'
BALANCED = f"{MOE}, balance_weight = 0.3"
PACKED = 'rows = "packed", cross_documents = false'
GROUPS = 'groups = [{ match = ["*down_proj*"], lr_scale = 0.25 }]'
QUERY_NORMS = f"{DECODER.replace('llama-1m', 'qwen3-30b-a3b')}, experts = 4, top_k = 2, vocab = 257"
LORA = '[task.adapter]\nkind = "lora"\nrank = 4\nalpha = 8\n'
OWN = 'name = "planted_models:Transposed"'
TIED_CHAIN = 'name = "planted_models:TiedChain"'
SHARED_EXPERTS = f"{BALANCED.replace('moe-2m', 'deepseek-moe-16b')}, top_k = 2, vocab = 257"
HEAD_GROUP = GROUPS.replace("*down_proj*", "head.*")
FROZEN_HEAD = HEAD_GROUP.replace(" }]", ', frozen_until = "200 steps" }]')
GROWING = (
    '[task.growth]\nby = "schedule"\nlearning_rate = "sqrt"\n'
    '[[task.growth.changes]]\nafter = "3 steps"\nbatch = "28 samples"\n'
)
BY_NOISE = '[task.growth]\nby = "noise"\nlargest = "112 samples"\n'
METRICS = '[task.evaluate]\nmetrics = ["accuracy", "bits_per_byte"]\n'
BY_LOSS = '[task.selection]\nby = "loss"\ncandidates = 2\n'
OWN_BETAS = GROUPS.replace(" }]", ", arguments = { betas = [0.5, 0.6] } }]")
FROZEN_LATE = GROUPS.replace(" }]", ', frozen_after = "200 steps" }]')
INTERLEAVED = "pp=2,schedule=interleaved,virtual_stages=2"
COPIES = "dp_replicate = 2\n[plan.sync]\n"
OUTER = 'kind = "outer"\nevery = 2\nlr = 0.7\nmomentum = 0.9'
FROZEN = GROUPS.replace(" }]", ', frozen_until = "200 steps" }]')


@dataclass(frozen=True)
class Case:
    """A spec's model, and the layout that is asked for on the command line."""

    layout: str
    model: str = DECODER
    objective: str = ""  # of planted_models; empty is next_token
    data: str = ""  # more options of task.data, of task.optimizer and of the task
    optimizer: str = ""
    task: str = ""
    tables: str = ""
    plan: str = ""
    eps: str = "eps = 1e-5, "  # which not every rule reads


CASES = {
    "copies": Case("dp_replicate=2"),
    "zero 3": Case("dp_shard=2,zero=3"),
    "zero 1": Case("dp_shard=2,zero=1"),
    "whole gradients": Case("dp_shard=2,zero=3,gradients=whole"),
    "hybrid": Case("dp_replicate=2,dp_shard=2"),
    "state on the host": Case("dp_replicate=2,offload=optimizer"),
    "tied": Case("dp_replicate=2", f"{DECODER}, tied = true"),
    "dropout": Case("dp_replicate=2", 'name = "planted_models:Dropout"'),
    "dropout, recompute": Case("dp_replicate=2,recompute=full", 'name = "planted_models:Dropout"'),
    "tensor": Case("tp=2"),
    "stages": Case("pp=2"),
    "stages, tied": Case("pp=2", f"{DECODER}, tied = true"),
    "stages, dropout": Case("pp=2", 'name = "planted_models:Chain"'),
    "shared sequences": Case("cp=2"),
    "experts": Case("dp_shard=2,ep=2", f'{MOE}, balance = "bias"'),
    "experts, tensor": Case("tp=2", BALANCED),
    "experts, stages": Case("pp=2", BALANCED),
    "experts, stages, bias": Case("pp=2", f'{MOE}, balance = "bias"'),
    "experts, shared sequences": Case("cp=2", BALANCED),
    "experts, shared by three": Case("cp=3", BALANCED),
    # What the twin must keep three of.
    "ring of four": Case("cp=4,cp_method=ring"),
    "sequences shared by four": Case("cp=4"),
    "four stages": Case("pp=4", DECODER.replace("layers = 2", "layers = 5")),
    "tensor ranks of four": Case("tp=4", DECODER.replace("kv_heads = 2", "kv_heads = 4")),
    # Rows of several documents, noise, and parameters that are trained otherwise.
    "packed rows, shared sequences": Case("cp=2", data=PACKED),
    "noise, shared sequences": Case("cp=2", task="embedding_noise = 5.0"),
    "groups, zero 3": Case("dp_shard=2,zero=3", optimizer=GROUPS),
    "frozen groups": Case("dp_shard=2", optimizer=FROZEN),
    "layer rates, stages": Case("pp=2", optimizer="layer_decay = 0.7"),
    "muon, zero 3": Case("dp_shard=2,zero=3", optimizer='name = "muon"'),
    "activations on the host": Case("dp_replicate=2,offload=activations"),
    "experts, spread and tensor": Case("dp_shard=2,ep=2,tp=2", BALANCED),
    "experts, hybrid": Case("dp_replicate=2,dp_shard=2,ep=2", BALANCED),
    "LoRA, tensor": Case("tp=2", tables=LORA),
    "DoRA, tensor": Case("tp=2", tables=LORA.replace("lora", "dora")),
    "query norms, tensor": Case("tp=2", QUERY_NORMS),
    "stages, copies": Case("dp_replicate=2,pp=2"),
    "stages, tied, shards": Case("dp_shard=2,pp=2", f"{DECODER}, tied = true"),
    "growing batches": Case("dp_replicate=2", tables=GROWING),
    "outer steps": Case("dp_replicate=2", plan=f"{COPIES}{OUTER}"),
    "rounded sums": Case("dp_replicate=2", plan=f'{COPIES}wire = "bf16"'),
    "dropout, shards": Case("dp_shard=2,zero=3", 'name = "planted_models:Dropout"'),
    "loss by the world": Case("dp_replicate=2", objective="by_world"),
    # Options that few tasks have.
    "betas of a group, zero 3": Case("dp_shard=2,zero=3", optimizer=OWN_BETAS),
    "groups frozen late, lion": Case("dp_shard=2", optimizer=f'name = "lion", {FROZEN_LATE}', eps=""),
    "growing by samples": Case("dp_replicate=2", tables=GROWING.replace("3 steps", "42 samples")),
    "growing by noise": Case("dp_replicate=2", tables=BY_NOISE),
    "metrics, tensor": Case("tp=2", tables=METRICS),
    "metrics, copies": Case("dp_replicate=2", tables=METRICS),
    "noise, copies": Case("dp_replicate=2", task="embedding_noise = 5.0"),
    "LoRA with dropout, tensor": Case("tp=2", tables=f"{LORA}dropout = 0.3\n"),
    "selection": Case("dp_replicate=2", tables=BY_LOSS),
    "largest losses": Case("dp_replicate=2", tables=BY_LOSS.replace('"loss"', '"largest"')),
    "experts, interleaved": Case(INTERLEAVED, BALANCED.replace("layers = 2", "layers = 5")),
    # Two options that meet.
    "experts, copies": Case("dp_replicate=2", BALANCED),
    "tied group, stages": Case("pp=2", TIED_CHAIN, optimizer=HEAD_GROUP),
    "tied group frozen, stages": Case("pp=2", TIED_CHAIN, optimizer=FROZEN_HEAD),
    "layer rates and groups, stages": Case("pp=2", optimizer=f"layer_decay = 0.7, {GROUPS}"),
    "layer rates, stages, tied": Case("pp=2", TIED_CHAIN, optimizer="layer_decay = 0.7"),
    "growing by noise, experts": Case("dp_replicate=2", f'{MOE}, balance = "bias"', tables=BY_NOISE),
    "growing by noise, rarely": Case("dp_replicate=2", tables=BY_NOISE + "measurements = 3\n"),
    "selection, dropout": Case("dp_replicate=2", 'name = "planted_models:Dropout"', tables=BY_LOSS),
    "selection, experts": Case("dp_replicate=2", BALANCED, tables=BY_LOSS),
    "branches, copies": Case("dp_replicate=2", 'name = "planted_models:Branches"'),
    "branches, zero 3": Case("dp_shard=2,zero=3", 'name = "planted_models:Branches"'),
    "own rule, zero 3": Case("dp_shard=2,zero=3", optimizer='name = "planted_models:Counted"', eps=""),
    "shared experts, tensor": Case("tp=2", SHARED_EXPERTS),
    "packed rows, copies": Case("dp_replicate=2", data=PACKED),
    # Options that are rarely used together.
    "rounded sums of four": Case("dp_replicate=4", plan=f'{COPIES.replace("2", "4")}wire = "bf16"'),
    "outer steps, shards": Case("dp_replicate=2,dp_shard=2", plan=f"{COPIES}{OUTER}"),
    "growing by noise, frozen groups": Case("dp_replicate=2", optimizer=FROZEN, tables=BY_NOISE),
    "largest losses, stages": Case("pp=2", tables=BY_LOSS.replace('"loss"', '"largest"')),
    "packed rows, shared by four": Case("cp=4", data=PACKED),
    "LoRA with dropout, shared sequences": Case("cp=2", tables=f"{LORA}dropout = 0.3\n"),
    "noise, shared sequences, tensor": Case("cp=2,tp=2", task="embedding_noise = 5.0"),
    "metrics, shared sequences": Case("cp=2", tables=METRICS),
    "metrics, stages": Case("pp=2", tables=METRICS),
    "experts, spread, shared sequences": Case("dp_shard=2,cp=2,ep=2", BALANCED),
    "stages, tied, copies": Case("dp_replicate=2,pp=2", f"{DECODER}, tied = true"),
    "stages, tensor": Case("pp=2,tp=2"),
    "stages, dropout, own recompute": Case("pp=2", 'name = "planted_models:RecomputedChain"'),
    "scalar, hybrid": Case("dp_replicate=2,dp_shard=2", 'name = "planted_models:Tempered"'),
    "adafactor, zero 3": Case("dp_shard=2,zero=3", optimizer='name = "adafactor"', eps=""),
    "growing, state on the host": Case("dp_replicate=2,offload=optimizer", tables=GROWING),
    "transposed, copies": Case("dp_replicate=2", 'name = "planted_models:Transposed"'),
    "branches, zero 1, bf16": Case("dp_shard=2,zero=1,precision=bf16", 'name = "planted_models:Branches"'),
    "whole weights, zero 3": Case("dp_shard=2,zero=3", 'name = "planted_models:WholeBranches"'),
    "dropout, selective": Case("dp_replicate=2,recompute=selective", 'name = "planted_models:Dropout"'),
    "stages, zero-bubble": Case("pp=2,schedule=zero-bubble"),
    "unequal shares": Case("dp_replicate=2", plan='dp_replicate = 2\nrows = "11+3"'),
    # What no mistake was planted in for long.
    "four bits, shards": Case("dp_shard=2,zero=3,frozen=spread", tables=f'{LORA}base_dtype = "nf4"\n'),
    "gathered rows of four": Case("dp_replicate=4", 'name = "planted_models:Halves"', "gathered_nce"),
    "statistics of all of four": Case("dp_replicate=4", 'name = "planted_models:Synced"'),
    "statistics beside tables": Case("dp_replicate=2", 'name = "planted_models:Tables"'),
    "biases, tensor": Case("tp=2", 'name = "planted_models:Biased"'),
    "branches, hybrid": Case("dp_replicate=2,dp_shard=2", 'name = "planted_models:Branches"'),
    "zero 2": Case("dp_shard=2,zero=2"),
    "copies, recompute": Case("dp_replicate=2,recompute=full"),
    "experts, stages, copies": Case("dp_replicate=2,pp=2", BALANCED),
    # Layers, stages and sequences that ranks share, in rarer ways.
    "fused, tensor": Case("tp=2", 'name = "planted_splits:Fused"'),
    "gathered, tensor": Case("tp=2", 'name = "planted_splits:Gathered"'),
    "split biases, tensor": Case("tp=2", 'name = "planted_splits:SplitBiases"'),
    "dropped, tensor": Case("tp=2", 'name = "planted_splits:Dropped"'),
    "muon, tensor": Case("tp=2", optimizer='name = "muon"'),
    "selection, tensor": Case("tp=2", tables=BY_LOSS),
    "packed rows, shared sequences, bf16": Case("cp=2,precision=bf16", data=PACKED),
    "stages that count": Case("pp=2", 'name = "planted_splits:CountingChain"'),
    "stages, shards, zero 1": Case("dp_shard=2,pp=2,zero=1"),
    "stages, tied, bf16": Case("pp=2,precision=bf16", f"{DECODER}, tied = true"),
    "experts, slots": Case("dp_shard=2,ep=2,expert_slots=1.5", BALANCED),
    # Losses that are no sums over rows.
    "contrast": Case("dp_replicate=2", 'name = "planted_models:Halves"', "info_nce"),
    "gathered contrast": Case("dp_replicate=2", 'name = "planted_models:Halves"', "nce_without_gradients"),
    "batch statistics": Case("dp_replicate=2", 'name = "planted_models:BatchStatistics"'),
    "statistics of all": Case("dp_replicate=2", 'name = "planted_models:Synced"'),
    "mean and one": Case("dp_shard=2", 'name = "planted_models:Chain"', "mean_and_one"),
    "mean and rows": Case("dp_shard=2", 'name = "planted_models:Chain"', "mean_and_rows"),
    "capacity by the tokens of a micro-batch": Case("dp_replicate=2", 'name = "planted_models:Capacity"'),
    "attention takes rows for tokens": Case("dp_replicate=2", 'name = "planted_models:Crossed"'),
    "positions go on from row to row": Case("dp_shard=2", 'name = "planted_models:Counting"'),
    "rows are mixed with others of their micro-batch": Case("dp_replicate=2", OWN, "mixed_rows"),
    "a z-loss is a mean": Case("dp_shard=2", OWN, "z_mean"),
    "classes weigh by a micro-batch's own counts": Case("dp_replicate=2", OWN, "balanced"),
    "the harder half of a micro-batch": Case("dp_shard=2", OWN, "hardest"),
    "noise by a seed of the rank": Case("dp_replicate=2", OWN, "noise_by_rank"),
    "a rank scales by its own number": Case("dp_shard=2", 'name = "planted_models:ByPlace"'),
    # Precisions of less than fp32.
    "copies, bf16": Case("dp_replicate=2,precision=bf16"),
    "copies, fp16": Case("dp_replicate=2,precision=fp16"),
    "zero 3, bf16": Case("dp_shard=2,zero=3,precision=bf16"),
    "zero 1, bf16": Case("dp_shard=2,zero=1,precision=bf16"),
    "shared sequences, bf16": Case("cp=2,precision=bf16"),
    "experts, bf16": Case("dp_shard=2,ep=2,precision=bf16", BALANCED),
    "experts, fp16": Case("dp_shard=2,ep=2,precision=fp16", BALANCED),
    "experts, bias, fp16": Case("dp_shard=2,ep=2,precision=fp16", f'{MOE}, balance = "bias"'),
    "zero 2, bf16": Case("dp_shard=2,zero=2,precision=bf16"),
    "zero 3, fp16": Case("dp_shard=2,zero=3,precision=fp16"),
    "stages, bf16": Case("pp=2,precision=bf16"),
    "tensor, bf16": Case("tp=2,precision=bf16"),
    "experts, tensor, bf16": Case("tp=2,precision=bf16", BALANCED),
    "experts, shared sequences, bf16": Case("cp=2,precision=bf16", BALANCED),
}

PROOFS = [
    *planted.PROOFS, *planted_axes.AXIS_PROOFS, *planted_experts.EXPERT_PROOFS, *planted_three.THREE_PROOFS,
    *planted_lines.LINE_PROOFS, *planted_rare.RARE_PROOFS, *planted_story.STORY_PROOFS, *planted_low.LOW_PROOFS,
    *planted_odd.ODD_PROOFS, *planted_met.MET_PROOFS, *planted_beyond.UPDATES_PROOFS,
    *planted_beyond.BEYOND_PROOFS, *planted_fresh.FRESH_PROOFS, *planted_splits.SPLIT_PROOFS,
]  # fmt: skip
# Without a mistake cases prove equal, in every part of the proof.
CONTROLLED = (
    "copies", "zero 3", "tied", "state on the host", "dropout", "stages, dropout",
    "statistics of all", "experts", "experts, stages, bias",
    "experts, shared by three", "ring of four", "four stages", "tensor ranks of four", "zero 3, bf16", "copies, fp16",
    "experts, tensor, bf16", "experts, bf16", "packed rows, shared sequences",
    "metrics, tensor", "growing by noise", "LoRA with dropout, tensor",
    "selection", "largest losses", "four bits, shards", "gathered rows of four", "statistics of all of four",
    "statistics beside tables", "experts, slots", "split biases, tensor", "gathered, tensor", "stages that count",
)  # fmt: skip
CONTROLS = [Planted("control", f"nothing, {case}", case, nothing, "", "") for case in CONTROLLED]


def name_of(bug: Planted) -> str:
    """Return a mistake's name as an attribute."""
    return re.sub(r"\W+", "_", bug.what)


BY_NAME = {name_of(bug): bug for bug in (*PROOFS, *CONTROLS)}
