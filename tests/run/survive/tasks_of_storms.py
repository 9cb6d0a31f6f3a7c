"""Tasks beside the decoder that keep something of their own between steps: what a fault must not take from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gans import gan_task
from survive_runs import Counted, DiesInAStepThatIsMadeAgain, LeavesAsIfDone, WaitsInALock, normed
from tests_shared import SEQ_LEN, VOCAB, Dropout, PaddedText, decoder_task

from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.data.mix import MixSpec
from paceline.spec.steps.growth import BatchChange, GrowthSpec
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.steps.update import GroupSpec, OptimizerSpec, ScheduleSpec
from paceline.spec.sync import Sync
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec, HeldOutSetSpec
from paceline.units import Amount

SMALL: dict[str, Any] = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 24}


@dataclass(frozen=True)
class StormTask:
    """A task, made in the folder of its runs, with what it needs of `[run]`, of the plan, and of the layout."""

    make: Callable[[Path], Task]
    run: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=lambda: {"dp_replicate": 2})
    faults: tuple[dict[str, Any], ...] = ()  # which the calm run meets too
    items_per_sample: int = SEQ_LEN
    unit: str = "tokens"


class FewRows(PaddedText):
    """An epoch is over in three steps and a part of the fourth."""

    samples, fingerprint = 43, "few-rows"


class HeldRows(PaddedText):
    """Other rows than those that are trained on."""

    samples, fingerprint = 24, "held-rows"

    def _row(self, index: int) -> Any:
        return super()._row(index + 5000)


def locking_up(folder: Path) -> Task:
    waits = WaitsInALock(folder / "mark")
    return decoder_task(model=waits.model, callbacks=(waits,))


def of_decoder(**changes: Any) -> Callable[[Path], Task]:
    return lambda folder: decoder_task(**changes)


def mixed(rows: str) -> Callable[[Path], Task]:
    """Return what makes a task on two sources of text, of which one is read three times as often."""

    def make(folder: Path) -> Task:
        for name, factor in (("plain", 7919), ("other", 104729)):
            (folder / name).mkdir(exist_ok=True)
            for number in range(40):
                words = " ".join(str((number + at) * factor % 9973) for at in range(3 + 5 * (number % 7)))
                (folder / name / f"{number}.txt").write_text(words)
        sources = MixSpec(source=str(folder / "plain"), weight=3.0), MixSpec(source=str(folder / "other"))
        data = DataSpec(mix=sources, seq_len=SEQ_LEN, validation_fraction=0.0, cache_dir=str(folder / "cache"),
                        rows=rows, cross_documents=rows == "windows")  # fmt: skip
        return decoder_task(model=ModelSpec("llama-1m", **SMALL), data=data)

    return make


def grown(**options: Any) -> Callable[[Path], Task]:
    return of_decoder(growth=GrowthSpec(learning_rate="sqrt", **options))


SHARDS = {"dp_shard": 2}
CHANGES = tuple(BatchChange(Amount(after, "steps"), Amount(batch, "samples")) for after, batch in ((3, 21), (8, 34)))
NOISE: dict[str, Any] = {"largest": Amount(40, "samples"), "measure_every": 1, "measurements": 3, "noise_ratio": 0.01}
GROUPS = (GroupSpec(match=("embed*",), frozen_until=Amount(5, "steps")),
          GroupSpec(match=("*layers.0*",), frozen_after=Amount(6, "steps")))  # fmt: skip
RESTARTS = ScheduleSpec("torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", arguments={"T_0": 3})
ROUTED = ModelSpec("moe-2m", **SMALL, vocab=VOCAB, balance="bias")
HELD = EvaluateSpec((), sets=(HeldOutSetSpec("held", HeldRows()),), patience=5, min_delta=1.0)
BEST = {"evaluate_every": "2 steps", "checkpoints": {"keep_best": 1, "save_best": True}}
APART, ROUNDED = Sync("outer", every=7, lr=0.7, momentum=0.9), Sync(wire="bf16")
NAN: dict[str, Any] = {"kind": "nan", "rank": 1, "step": 6}
BURST: dict[str, Any] = {"kind": "flip", "rank": 1, "step": 10, "bit": 26}  # a gradient 256 times as large
HANGS = {"hang_minimum": "500 ms", "hang_factor": 4.0}
SKIPS = {"health": {**HANGS, "on_nonfinite": "skip"}}
BACK = {"health": {**HANGS, "on_spike": "rollback", "spike_window": 8, "spike_deviations": 20.0}}
LORA = AdapterSpec(kind="lora", rank=3, init="random", dropout=0.25)

TASKS = {
    "keeps": StormTask(of_decoder(model=normed, callbacks=(Counted(),))),
    "draws": StormTask(of_decoder(model=Dropout), layout=SHARDS),
    "grows by a schedule": StormTask(grown(by="schedule", changes=CHANGES), layout=SHARDS),
    "grows by noise": StormTask(grown(by="noise", **NOISE)),
    "selects": StormTask(of_decoder(selection=SelectionSpec(by="loss", candidates=2))),
    "epochs": StormTask(of_decoder(data=FewRows()), layout=SHARDS),
    "routes": StormTask(of_decoder(model=ROUTED)),
    "routes over ranks": StormTask(of_decoder(model=ROUTED), layout={"dp_shard": 2, "ep": 2}),
    "muon": StormTask(of_decoder(optimizer=OptimizerSpec(name="muon", lr=3e-3))),
    "freezes": StormTask(of_decoder(optimizer=OptimizerSpec(lr=3e-3, groups=GROUPS)), layout=SHARDS),
    "restarts its rate": StormTask(of_decoder(schedule=RESTARTS)),
    "takes turns": StormTask(lambda folder: gan_task(every=2), items_per_sample=1, unit="samples"),
    "scales": StormTask(of_decoder(), plan={"precision": "fp16"}),
    "adapts": StormTask(of_decoder(adapter=LORA)),
    "stops early": StormTask(of_decoder(evaluate=HELD), run=BEST),
    "mixes": StormTask(mixed("windows"), layout=SHARDS),
    "packs": StormTask(mixed("packed")),
    "steps apart": StormTask(of_decoder(), plan={"sync": APART}),
    "sends bf16": StormTask(of_decoder(), plan={"sync": ROUNDED}),
    "skips": StormTask(of_decoder(), run=SKIPS, faults=(NAN,)),
    "goes back": StormTask(of_decoder(), run=BACK, faults=(BURST,)),
    "splits": StormTask(of_decoder(), layout={"tp": 2}),
    "pipes": StormTask(of_decoder(), layout={"pp": 2}),
    "shares sequences": StormTask(of_decoder(), layout={"cp": 2}),
    "computes again": StormTask(of_decoder(), plan={"zero": 2, "recompute": "full"}, layout=SHARDS),
}
# Those of one test, which end by themselves.
OF_ONE_TEST = {
    "leaves as if done": StormTask(lambda folder: decoder_task(callbacks=(LeavesAsIfDone(folder / "mark"),))),
    "locks up": StormTask(locking_up),
    "goes back and dies": StormTask(of_decoder(callbacks=(DiesInAStepThatIsMadeAgain(),)), run=BACK, faults=(BURST,)),
}
