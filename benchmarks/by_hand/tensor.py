"""Tensor parallel by hand: `parallelize_module` with sequence parallel and a loss over a spread vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from race.contenders import CLIP_NORM, Job, adamw, hand_batches, mean_of
from race.pacing import Pacer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def tensor_loop(pacer: Pacer, job: Job) -> None:
    """Train with every layer's matrices spread over all processes, the stream between them along the sequence."""
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    model: Any = job.decoder()
    spread_by_torch(model, job.processes)
    optimizer = adamw(model)
    pacer.ready()
    for batches in hand_batches(job):
        losses = []
        optimizer.zero_grad(set_to_none=True)
        for tokens, labels in batches:
            with loss_parallel():
                loss = F.cross_entropy(_logits(model, tokens).flatten(0, 1), labels.flatten())
                (loss / job.accumulation).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if not pacer.step_done(lambda losses=losses: mean_of([loss.full_tensor() for loss in losses])()):  # type: ignore[misc]
            break


def spread_by_torch(model: Any, ranks: int) -> None:
    """Change an untied decoder in place as torchtitan does with its Llama."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model.norm = _torch_norm(model.norm)
    ends = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        layer.input_layernorm = _torch_norm(layer.input_layernorm)
        layer.post_attention_layernorm = _torch_norm(layer.post_attention_layernorm)
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": _whole_input(Shard(1), None, None, None),  # cosines, sines and mask are whole
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": _whole_input(Shard(1)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


def _whole_input(*held: Any) -> PrepareModuleInput:
    """Return the style of a module whose inputs are `held` and must be whole."""
    whole = tuple(place and Replicate() for place in held)
    return PrepareModuleInput(input_layouts=held, desired_input_layouts=whole)


def _torch_norm(norm: Any) -> nn.RMSNorm:
    """Return torch's own norm with the same weight: the built-in one is written for plain tensors."""
    same = nn.RMSNorm(norm.weight.shape[0], eps=norm.eps)
    same.weight = norm.weight
    return same


def _logits(model: Any, tokens: Tensor) -> Tensor:
    """Return logits [rows, seq, vocab], a DTensor with its vocabulary spread."""
    x, cos, sin = model.begin(tokens, None)
    for layer in model.layers:
        x = layer(x, cos, sin, None)
    return model.lm_head(model.norm(x))
