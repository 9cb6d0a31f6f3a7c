"""The contenders: one training step written with each library, for the same model, data and optimizer.

Each loop builds `build_model`'s decoder, reads rows in Paceline's order, and makes updates of `micro_batch` x
`accumulation` rows per process with fused AdamW after clipping. All get what is cheapest for them: rows ready in
memory, no logging, no saving. Only Paceline writes a record (its journal) every step, as it always does.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import TokenRows
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.task.data.order.permutation import sample_ids
from paceline.task.models.build import build_model
from race.pacing import Pacer

SEED = 7
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
SAMPLES = 4096


@dataclass(frozen=True)
class Job:
    """What every contender trains, per process."""

    model: str
    seq_len: int
    vocab: int
    micro_batch: int
    accumulation: int
    steps: int  # at least as many as are asked for
    processes: int
    threads: int  # per process
    precision: str  # fp32 or bf16
    run_dir: str
    shared: int = 1  # processes that work on the same rows
    tied: bool = True  # whether the head is the embedding

    @property
    def readers(self) -> int:
        """Groups of processes that read different rows."""
        return self.processes // self.shared

    @property
    def global_batch(self) -> int:
        """Rows in one update over all processes."""
        return self.micro_batch * self.accumulation * self.readers

    @property
    def spec(self) -> paceline.ModelSpec:
        """What the model is."""
        return paceline.ModelSpec(self.model, tied=self.tied)

    def source(self) -> TokenRows:
        """Return the rows that are trained on."""
        return TokenRows(SAMPLES, self.seq_len, self.vocab)

    def decoder(self) -> nn.Module:
        """Return the model with its initial weights."""
        return build_model(self.spec, self.vocab, self.seq_len, SEED).train()


class Ordered(Dataset):
    """The source's rows in the order in which Paceline reads them, fetched a micro-batch at a time."""

    def __init__(self, job: Job) -> None:
        source = job.source()
        order = sample_ids(SEED, np.arange((job.steps + 2) * job.global_batch), source.samples)
        self.rows = source.read(order)

    def __len__(self) -> int:
        return len(self.rows["tokens"])

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {name: tensor[indices] for name, tensor in self.rows.items()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])


def as_it_is(batch: Any) -> Any:
    """Return the batch: the data set makes whole micro-batches."""
    return batch


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every contender: fused, with weight decay on matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)


def mean_of(losses: list[Tensor]) -> Callable[[], float]:
    """Return what computes the mean of a step's losses, if anyone asks."""
    return lambda: float(torch.stack(losses).mean())


def hand_batches(job: Job) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield this rank's micro-batches of each step: contiguous slices, which cost next to nothing."""
    rows = Ordered(job).rows
    reader, each = int(os.environ.get("RANK", "0")) // job.shared, job.micro_batch * job.accumulation
    for first in range(reader * each, len(rows["tokens"]), job.global_batch):
        parts = [slice(start, start + job.micro_batch) for start in range(first, first + each, job.micro_batch)]
        yield [(rows["tokens"][part], rows["labels"][part]) for part in parts]


def bare(pacer: Pacer, job: Job) -> None:
    """A loop by hand: plain modules, DistributedDataParallel for several processes."""
    torch.set_num_threads(job.threads)
    model = job.decoder()
    wrapped: Any = model
    if job.processes > 1:
        dist.init_process_group("gloo")
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model)
    pacer.ready()
    for batches in hand_batches(job):
        losses = []
        optimizer.zero_grad(set_to_none=True)
        for index, (tokens, labels) in enumerate(batches):
            if job.processes > 1:
                wrapped.require_backward_grad_sync = index == job.accumulation - 1  # what no_sync() sets
            loss_sum, weight = wrapped(tokens, labels=labels)
            loss = loss_sum / weight
            (loss / job.accumulation).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if not pacer.step_done(mean_of(losses)):
            break


def bare_sharded(pacer: Pacer, job: Job, zero: int = 3) -> None:
    """A loop by hand on FSDP2: `fully_shard` on every layer and on the rest, as its tutorial does.

    Below ZeRO-3 weights stay gathered until the step's last backward pass; ZeRO-1 reduces gradients in that one alone.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    model: Any = job.decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if job.precision == "bf16" else {}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=zero == 3, **options)
    sharded: Any = fully_shard(model, **options)
    optimizer = adamw(sharded)
    pacer.ready()
    for batches in hand_batches(job):
        losses = []
        optimizer.zero_grad(set_to_none=True)
        for index, (tokens, labels) in enumerate(batches):
            last = index == job.accumulation - 1
            sharded.set_is_last_backward(last)
            if zero < 3:
                sharded.set_reshard_after_backward(last)
            if zero == 1:
                sharded.set_requires_gradient_sync(last)
            loss_sum, weight = sharded(tokens, labels=labels)
            loss = loss_sum / weight
            (loss / job.accumulation).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(sharded.parameters(), CLIP_NORM)
        optimizer.step()
        if not pacer.step_done(mean_of(losses)):
            break


def paceline_loop(pacer: Pacer, job: Job, plan: dict[str, Any]) -> None:
    """Paceline's public loop under a layout, with its journal; checkpoints and evaluation are off."""
    task = paceline.Task(
        name="overhead",
        model=job.spec,
        data=job.source(),
        optimizer=paceline.OptimizerSpec(lr=LEARNING_RATE, clip_norm=CLIP_NORM),
        schedule=paceline.ScheduleSpec(kind="constant"),
        global_batch=paceline.Amount(job.global_batch, "samples"),
        stop=paceline.Amount(job.steps + 1, "steps"),
        seed=SEED,
    )
    run = paceline.Run(
        task,
        plan={
            **plan,
            "micro_batch": job.micro_batch,
            "precision": job.precision,
            "recompute": "none",
        },
        cluster={"device": "cpu", "devices": job.processes},
        run={"dir": job.run_dir, "checkpoint_every": None, "evaluate_every": None, "verify": False},
    )
    torch.set_num_threads(job.threads)
    pacer.ready()
    for batch in run:
        stats = run.step(batch)
        if not pacer.step_done(functools.partial(float, stats.loss)):
            break


def accelerate_loop(pacer: Pacer, job: Job) -> None:
    """Hugging Face Accelerate, as its guide to gradient accumulation writes it."""
    from accelerate import Accelerator

    torch.set_num_threads(job.threads)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation)
    model = job.decoder()
    loader = DataLoader(Ordered(job), batch_size=job.micro_batch, collate_fn=as_it_is)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    losses: deque[Tensor] = deque(maxlen=job.accumulation)
    pacer.ready()
    for batch in loader:
        with accelerator.accumulate(model):
            loss_sum, weight = model(batch["tokens"], labels=batch["labels"])
            loss = loss_sum / weight
            accelerator.backward(loss)  # divides by the accumulation
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not pacer.step_done(mean_of(list(losses))):
            break


def fabric_loop(pacer: Pacer, job: Job) -> None:
    """Lightning Fabric, as its guide to gradient accumulation writes it."""
    from lightning.fabric import Fabric

    torch.set_num_threads(job.threads)
    strategy = "ddp" if job.processes > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=job.processes, strategy=strategy, precision="32-true")
    fabric.launch()
    bare_model = job.decoder()
    model, optimizer = fabric.setup(bare_model, adamw(bare_model))
    loader = fabric.setup_dataloaders(DataLoader(Ordered(job), batch_size=job.micro_batch, collate_fn=as_it_is))
    losses: list[Tensor] = []
    pacer.ready()
    for index, batch in enumerate(loader):
        accumulating = (index + 1) % job.accumulation != 0
        with fabric.no_backward_sync(model, enabled=accumulating and job.processes > 1):
            loss_sum, weight = model(batch["tokens"], labels=batch["labels"])
            loss = loss_sum / weight
            fabric.backward(loss / job.accumulation)
            losses.append(loss.detach())
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if not pacer.step_done(mean_of(losses)):
                break
            losses = []


class WithLoss(nn.Module):
    """The same decoder with the interface that the Trainer asks for: a loss, normalised by the whole batch's items."""

    def __init__(self, decoder: nn.Module, accumulation: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.seen: deque[Tensor] = deque(maxlen=accumulation)

    def forward(self, tokens: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Return {"loss": ...}."""
        loss_sum, weight = self.decoder(tokens, labels=labels)
        self.seen.append((loss_sum / weight).detach())
        return {"loss": loss_sum / (weight if num_items_in_batch is None else num_items_in_batch)}


def trainer_loop(pacer: Pacer, job: Job) -> None:
    """The Hugging Face Trainer with logging and saving off; a callback counts the steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = WithLoss(job.decoder(), job.accumulation)

    class Paced(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.set_num_threads(job.threads)
            pacer.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not pacer.step_done(mean_of(list(model.seen)))

    options: dict[str, Any] = {"ddp_backend": "gloo"} if job.processes > 1 else {}
    arguments = TrainingArguments(
        output_dir=job.run_dir,
        use_cpu=True,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.accumulation,
        max_steps=job.steps + 1,
        max_grad_norm=CLIP_NORM,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    optimizer = adamw(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    Trainer(
        model=model,
        args=arguments,
        data_collator=as_it_is,
        train_dataset=Ordered(job),
        callbacks=[Paced()],
        optimizers=(optimizer, constant),
    ).train()


LOOPS: dict[str, Callable[..., None]] = {
    "bare": bare,
    "paceline": paceline_loop,
    "accelerate": accelerate_loop,
    "fabric": fabric_loop,
    "trainer": trainer_loop,
}
