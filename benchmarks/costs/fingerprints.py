"""What fingerprints of values cost: CPU time of fingerprinting against that of saving the same tensors.

`python benchmarks/costs/fingerprints.py` prints one line per kind of tensor; ratios are of this process's CPU time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from paceline.checkpoint import save_checkpoint
from paceline.checkpoint.fingerprint import parts_held

KINDS: dict[str, tuple[list[tuple[int, ...]], torch.dtype]] = {
    "a decoder's matrices, fp32": ([(1024, 1024)] * 12, torch.float32),
    "an embedding, fp32": ([(32000, 512)], torch.float32),
    "a decoder's matrices, bf16": ([(1024, 1024)] * 12, torch.bfloat16),
    "experts, fp32": ([(8, 2, 768, 512)] * 2, torch.float32),
    "a thousand small tensors, fp32": ([(256,)] * 1000, torch.float32),
}
ROUNDS = 3


def cpu_seconds(tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return CPU seconds of (fingerprints, a whole save, fingerprints included) of the tensors, the least of a few."""
    alone, saves = [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        parts_held(tensors)
        alone.append(time.process_time() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            save_checkpoint(Path(folder), 1, tensors, {}, keep_last=1)
            saves.append(time.process_time() - began)
    return min(alone), min(saves)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    kinds = dict(list(KINDS.items())[:1]) if "--quick" in sys.argv else KINDS
    print(f"{'tensors':<32} {'MB':>6} {'fingerprints':>14} {'rest of save':>14} {'part of save':>14}")
    for name, (shapes, dtype) in kinds.items():
        tensors = {str(index): torch.randn(shape).to(dtype) for index, shape in enumerate(shapes)}
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        alone, saving = cpu_seconds(tensors)
        rest = max(saving - alone, 1e-9)
        print(f"{name:<32} {size:>6.0f} {alone * 1e3:>11.1f} ms {rest * 1e3:>11.1f} ms {alone / saving:>13.0%}")


if __name__ == "__main__":
    main()
