"""Copies of the model under torchft, each a replica of its own: `python torchft_train.py FOLDER RANK RANKS`.

`python torchft_train.py FOLDER lighthouse MILLISECONDS` is the process by which replicas know of each other: one that
says nothing for so long is lost.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import tell_process, tell_step, tiny_loss, tiny_model

LIGHTHOUSE = "lighthouse"


def serve(folder: Path, milliseconds: int) -> None:
    """Serve for ever; the address is in the folder."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20, heartbeat_timeout_ms=milliseconds
    )
    (folder / "address.new").write_text(server.address())
    (folder / "address.new").replace(folder / LIGHTHOUSE)
    while True:
        time.sleep(3600)


def train(folder: Path, rank: int, ranks: int) -> None:
    """Train for ever: a step counts with the replicas that are there."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1",
        "TORCHFT_LIGHTHOUSE": (folder / LIGHTHOUSE).read_text(),
    }  # fmt: skip
    net = tiny_model()
    optimizer = torch.optim.AdamW(net.parameters())
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)), min_replica_size=1, replica_id=f"rank{rank}",
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (
            net.load_state_dict(state["net"]), optimizer.load_state_dict(state["optimizer"])
        ),
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    model, committing = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    tell_process(folder, rank)
    while True:
        before = manager.current_step()
        committing.zero_grad()
        tiny_loss(model).backward()
        committing.step()
        if rank == 0 and manager.current_step() > before:
            tell_step(folder, manager.num_participants())


if __name__ == "__main__":
    if sys.argv[2] == LIGHTHOUSE:
        serve(Path(sys.argv[1]), int(sys.argv[3]))
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
