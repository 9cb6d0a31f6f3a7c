"""What the benchmarks share: facts about the machine, robust statistics, and rows of tokens held in memory."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.cli.output import json_safe

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Return what a figure depends on besides the code: processor, cores, versions, date."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def strict_json(result: Any) -> str:
    """Return a result as JSON that any reader takes: a number that is not finite is null, since JSON has no NaN."""
    return json.dumps(json_safe(result), indent=1, allow_nan=False) + "\n"


def keep(name: str, figures: Any = None, page: str = "") -> None:
    """Write what a benchmark found: a page for readers; in the folder `figures` the same, and more, for programs."""
    if figures is not None:
        path = RESULTS / "figures" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(strict_json(figures))
    if page:
        (RESULTS / f"{name}.md").write_text(page)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@dataclass(frozen=True)
class Spread:
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float


def median_of(values: Sequence[float]) -> Spread:
    """Return the median with a distribution-free 95 % interval: order statistics, binomial in normal approximation.

    With fewer than six values the interval is their range. Source: Conover, Practical Nonparametric Statistics, 3.2.
    """
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, math.floor(len(ordered) / 2 - reach) - 1)
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))
    return Spread(statistics.median(ordered), ordered[low], ordered[high])


class TokenRows:
    """A source of `samples` rows of `seq_len` tokens, held in memory: walks with small steps, so there is a pattern."""

    def __init__(self, samples: int, seq_len: int, vocab: int, seed: int = 0) -> None:
        self.samples, self.items_per_sample = samples, seq_len
        self.vocab: int | None = vocab
        self.unit, self.fingerprint = "tokens", f"walks-{samples}-{seq_len}-{vocab}-{seed}"
        steps = np.random.default_rng(seed).integers(0, 3, (samples, seq_len + 1))
        walks = torch.from_numpy(steps.cumsum(axis=1) % vocab)
        self.tokens, self.labels = walks[:, :-1].contiguous(), walks[:, 1:].contiguous()  # int64 [samples, seq_len]

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows `ids`."""
        rows = torch.from_numpy(ids)
        return {"tokens": self.tokens[rows], "labels": self.labels[rows]}
