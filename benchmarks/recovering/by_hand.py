"""A loop by hand on copies of the model that saves after every step: `torchrun by_hand.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import load, save, tell_process, tell_step, tiny_loss, tiny_model
from torch import nn


def train(folder: Path) -> None:
    """Train for ever, from the last checkpoint on. The process group is there, or is made by torchrun's variables."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tell_process(folder, rank)
    net = tiny_model()
    optimizer = torch.optim.AdamW(net.parameters())
    step = load(folder, net, optimizer)
    model = nn.parallel.DistributedDataParallel(net)
    while True:
        optimizer.zero_grad()
        tiny_loss(model).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            save(folder, net, optimizer, step)
            tell_step(folder, ranks)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
