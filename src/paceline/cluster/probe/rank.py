"""One rank of a probe: the device, the process group, and how long calls take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.cluster.probe.busy import LEAST_CORE_SHARE
from paceline.cluster.probe.records import ProbeRequest, Timed

LEAST = 2  # calls of each pass, of what takes longer than its slot


def summary(samples: list[float]) -> Timed:
    """Return the lower quartile of seconds per call, and the relative spread, (90th - 10th percentile) / median.

    The quartile and not the median: whatever else runs on the machine can only make a call slower.
    """
    if len(samples) < 3:
        return {"seconds": min(samples), "spread": 0.0, "repeats": len(samples)}
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    spread = (deciles[-1] - deciles[0]) / statistics.median(samples)
    quartile = statistics.quantiles(samples, n=4, method="inclusive")[0]
    return {"seconds": quartile, "spread": spread, "repeats": len(samples)}


def undisturbed(passed: Timed, ran: Timed) -> Timed:
    """Return the time of a call of one thread by the clock, or its time on the core where another program held it up.

    What a core loses by itself, to the kernel and to a virtual machine's host, training loses as well, and its own time
    does not show that. Example: 41 ms of which it ran 40 are 41; 60 ms of which it ran 40 are 40.
    """
    return passed if ran["seconds"] >= LEAST_CORE_SHARE * passed["seconds"] else ran


class Rank:
    """One rank's device, process group and clock."""

    def __init__(self, request: ProbeRequest, rank: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.ranks, self.kind = rank, request["devices"], request["kind"]
        self.threads = request["threads"]
        torch.set_num_threads(self.threads)
        self.device = torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", rank)
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.kind == "cpu" else "nccl"
        store = dist.FileStore(str(folder / "rendezvous"), self.ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.ranks)
        # With one thread a core's own time tells how much of a call was another program's doing; but ranks that share
        # cores take turns, and that is what training will meet.
        self.knows_own_time = self.kind == "cpu" and request["threads"] == 1 and request["fair_share"] >= 1
        # A budget this small is for trying the probe out: only the smallest sizes are measured.
        self.trial = request["seconds_budget"] < 1
        # Some 60 measurements in each pass, and the import of torch.
        self.slot_seconds = request["seconds_budget"] / 100 / request["passes"]

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank, so that all ranks go the same way."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([float(condition)], device=self.device)
        dist.all_reduce(flag)
        return flag.item() > 0

    def time(self, call: Callable[[], object], repeats: int = 0) -> Timed:
        """Return the seconds per call while all ranks do the same; `repeats` fixes the number of calls.

        Collectives need the same number of calls on every rank; what is local fills a slot of time instead.
        """
        import torch.distributed as dist

        call()
        self.synchronize()
        begin, ran = time.perf_counter(), time.process_time()
        call()
        self.synchronize()
        ran, once = time.process_time() - ran, time.perf_counter() - begin
        batch = 1 if repeats else min(1000, max(1, math.ceil(1e-3 / max(once, 1e-7))))
        dist.barrier()
        counts = not repeats and once > self.slot_seconds  # what is longer than its slot is not done once for nothing
        samples, own = ([once], [ran]) if counts else ([], [])
        end = time.perf_counter() + self.slot_seconds
        while len(samples) < repeats if repeats else (time.perf_counter() < end or len(samples) < LEAST):
            begin, ran = time.perf_counter(), time.process_time()
            for _ in range(batch):
                call()
            self.synchronize()
            own.append((time.process_time() - ran) / batch)
            samples.append((time.perf_counter() - begin) / batch)
        return undisturbed(summary(samples), summary(own)) if self.knows_own_time and not repeats else summary(samples)

    def in_turns(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[Timed]:
        """Return the seconds per call of each, which take turns: what is slow for some seconds is so for all of them.

        For what is read from differences: a call that was slow beside one that was not says what nothing takes.
        """
        both = [(summary(passed), summary(own)) for passed, own in self.samples_in_turns(calls, rounds)]
        return [undisturbed(*each) if self.knows_own_time else each[0] for each in both]

    def samples_in_turns(
        self, calls: Sequence[Callable[[], object]], rounds: int, meets: bool = False
    ) -> list[tuple[list[float], list[float]]]:
        """Return the seconds of each call in each round, by the clock and on the core. Calls take turns.

        Where each `meets`, all ranks begin it together.
        """
        import torch.distributed as dist

        samples: list[tuple[list[float], list[float]]] = [([], []) for _ in calls]
        for number in range(rounds + 1):
            for call, (passed, own) in zip(calls, samples, strict=True):
                if meets:
                    dist.barrier()
                begin, ran = time.perf_counter(), time.process_time()
                call()
                self.synchronize()
                if number:  # the first one makes buffers and groups
                    own.append(time.process_time() - ran)
                    passed.append(time.perf_counter() - begin)
        return samples
