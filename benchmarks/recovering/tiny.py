"""The tiny program of every contender but Paceline: a model, a batch, and a note of the time of each step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, LAYERS, ROWS = 512, 4, 16


def tiny_model() -> nn.Sequential:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def tiny_loss(model: nn.Module) -> torch.Tensor:
    """Return the loss of a batch."""
    return model(torch.randn(ROWS, WIDTH)).square().mean()


def tell_process(folder: Path, rank: int) -> None:
    """Note this process's number, by which it is killed."""
    (folder / f"rank-{rank}").write_text(str(os.getpid()))


def tell_step(folder: Path, ranks: int) -> None:
    """Note when a step is made, and by how many ranks."""
    with (folder / "steps").open("a") as file:
        file.write(f"{time.time()} {ranks}\n")


def save(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save the state as a loop by hand does: beside the last one, and then in its place."""
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "new.pt")
    (folder / "new.pt").replace(folder / "state.pt")


def load(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what was saved last, and return its step; 0 where there is nothing."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
