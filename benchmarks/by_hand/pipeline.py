"""Pipelining by hand: two stages of plain modules under a schedule of `torch.distributed.pipelining`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from race.contenders import CLIP_NORM, Job, adamw, hand_batches
from race.pacing import Pacer
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.task.models.decoder import rotary_tables
from paceline.task.models.layers.loss import cross_entropy_sum

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class FirstStage(nn.Module):
    """The embedding and the first layers."""

    def __init__(self, decoder: Any, layers: int) -> None:
        super().__init__()
        self.config, self.embed_tokens, self.layers = decoder.config, decoder.embed_tokens, decoder.layers[:layers]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return hidden states [rows, seq, hidden]."""
        return _through(self, self.embed_tokens(tokens))


class LastStage(nn.Module):
    """The other layers, the norm, and the head's weight."""

    def __init__(self, decoder: Any, layers: int) -> None:
        super().__init__()
        self.config, self.layers = decoder.config, decoder.layers[layers:]
        self.norm, self.lm_head = decoder.norm, decoder.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head takes, [rows, seq, hidden]."""
        return self.norm(_through(self, x))

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a micro-batch, by the same function as the decoder's own."""
        loss_sum, weight = cross_entropy_sum(hidden, self.lm_head.weight, labels)
        return loss_sum / weight


def _through(stage: Any, x: Tensor) -> Tensor:
    tables = rotary_tables(stage.config, torch.arange(x.shape[1]), x.dtype)
    for layer in stage.layers:
        x = layer(x, *tables)
    return x


def pipeline_loop(pacer: Pacer, job: Job, schedule: str, first_layers: int) -> None:
    """Train with an untied decoder's first layers on one process and the rest on another."""
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    is_last = dist.get_rank() == 1
    whole = job.decoder()
    module: Any = LastStage(whole, first_layers) if is_last else FirstStage(whole, first_layers)
    del whole
    stage = PipelineStage(module, int(is_last), 2, torch.device("cpu"))
    loss = module.loss if is_last else lambda *_: None
    running = SCHEDULES[schedule](stage, job.accumulation, loss_fn=loss)  # divides gradients by the micro-batches
    optimizer = adamw(module)
    parameters = list(module.parameters())
    pacer.ready()
    for batches in hand_batches(job):
        losses: list[Tensor] = []
        optimizer.zero_grad(set_to_none=True)
        if is_last:
            running.step(target=torch.cat([labels for _, labels in batches]), losses=losses, return_outputs=False)
        else:
            running.step(torch.cat([tokens for tokens, _ in batches]))
        _clip(parameters)
        optimizer.step()
        if not pacer.step_done(lambda losses=losses: _mean_on_both(losses)):  # type: ignore[misc]
            break


def _clip(parameters: list[nn.Parameter]) -> None:
    """Clip by the norm over both stages."""
    square = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, square.sqrt())


def _mean_on_both(losses: list[Tensor]) -> float:
    """Return the mean loss, which the last stage alone has, on both."""
    mean = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
    dist.all_reduce(mean)
    return float(mean)
