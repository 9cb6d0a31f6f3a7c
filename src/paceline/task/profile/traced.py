"""The profile of any module: traced once, block by block, on an example batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.cluster.machine import usable_memory_bytes
from paceline.errors import ConfigError
from paceline.foreign_errors import ON_GPUS_ALONE, PLAIN_ON_CPU, is_of_no_gradient, tells_of_flex_attention
from paceline.spec.profile import BlockProfile, ModelProfile
from paceline.task.coupling import declares_coupling, gathers_rows
from paceline.task.declared import expert_axis, is_routed, tensor_axis
from paceline.task.entries_read import balance_remark, tried_reading, unread_remark
from paceline.task.models.blocks import find_blocks
from paceline.task.models.build import has_batch_statistics
from paceline.task.models.chain import chain_of
from paceline.task.models.copied import copied
from paceline.task.models.huggingface.interface import is_transformers, why_unshared
from paceline.task.models.layers.attention import can_share_sequences
from paceline.task.models.layers.batch_norm import sees_whole_batch
from paceline.task.objective import takes_sequence_parts
from paceline.task.profile.closed import (
    BATCH_STATISTICS,
    SEQUENCE_RULE,
    SYNCED_STATISTICS,
    TOKEN_SUM_RULE,
    UNWATCHED,
    closed_axes,
    coupled_axes,
    stray_axes,
)
from paceline.task.profile.operators.draws import of_no_sample, with_one_more
from paceline.task.profile.operators.for_real import MOST_BYTES, is_short
from paceline.task.profile.tracing import Counts, LateWeights, own_bytes, trace
from paceline.task.sums import NoSum
from paceline.task.touched_weights import touched_axes

CALL_IT = (
    "call the objective on the model and one batch in Python; where a step has turns, each objective by itself, on a"
    " model that has not been called: what another turn leaves on the model is of its last micro-batch"
)
NEEDS_GRADIENTS = (
    "`with torch.enable_grad():` around what asks for gradients inside of the objective: where a program is only looked"
    " at, and in evaluations, none are followed"
)
NEEDS_PLAIN_MODULES = (
    "the same modules without torch.jit.script: scripted ones take no hooks, by which blocks are told apart;"
    " plan.compile = true compiles blocks"
)
RESULTS_KEPT = (
    "what is kept for the backward pass is taken to be all that operators give: the forward pass uses transforms of"
    " torch.func, of which torch lets nobody watch what they keep"
)
REST = "rest"  # all that lies outside the repeated blocks, loss included
REAL_COPIES = 4  # a pass for real needs the weights, perhaps a second copy of them, and activations nobody knows of yet

Build = Callable[[], nn.Module]


def profile_module(
    model: nn.Module,
    example_batch: object,
    objective: Callable[[nn.Module, object], tuple[Tensor, Tensor]],
    items_per_sample: int | None = None,
    build: Build | None = None,
) -> ModelProfile:
    """Return a module's profile per sample, from one forward pass of `objective(model, example_batch)`.

    The first dimension of every tensor of the batch counts samples. The pass runs on fake tensors, so the model may
    be on the meta device or larger than memory; one that asks for values (`.item()`, a mask's indices) is run for
    real on the CPU: what `build` returns, or else a copy. Where that cannot be, its profile is estimated from its
    weights, and `note` says so. `items_per_sample` is what the loss counts; by default the labels of one sample. The
    repeated blocks come first, then one block for the rest. Raises ConfigError where the model fails on the batch.
    """
    rows = _rows(example_batch)
    blocks = find_blocks(model)
    experts, unstacked = expert_axis(model)
    items = items_per_sample or _items(example_batch, rows)
    (counts, routed, note), unread = tried_reading(
        objective, lambda what: _trace(model, blocks, list(experts), example_batch, what, build, rows * items)
    )
    unwatched = any(count.unwatched for count in counts)
    whole_batch = SYNCED_STATISTICS if sees_whole_batch(model) else {}
    if declares_coupling(model, objective):
        whole_batch = {**whole_batch, **coupled_axes(gathers_rows(objective))}
    if has_batch_statistics(model):
        whole_batch = BATCH_STATISTICS
    whole_batch = {
        **touched_axes(model),
        **stray_axes({name for count in counts for name in count.strays}),
        **(UNWATCHED if unwatched else {}),
        **whole_batch,
    }
    axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis not in whole_batch)
    limits, because = tensor_axis(model)
    unshared = _unshared(model, objective, example_batch)
    takes_parts = unshared == ""
    chained = chain_of(model) is not None  # BatchNorm closes pp again
    opened = [*(["tp"] if limits else []), *(["cp"] if takes_parts else []), *(["pp"] if chained else [])]
    opened += ["ep"] if experts else []
    model_closed = {
        axis: why for axis, why in (("tp", because), ("ep", unstacked), ("cp", unshared)) if why and axis not in opened
    }
    return ModelProfile(
        name=type(model).__name__,
        blocks=tuple(_profiles([*blocks, (REST, model)], counts, experts, routed, rows, axes)),
        tokens_per_sample=items,
        source="estimated" if note else "traced",
        note=note or (RESULTS_KEPT if unwatched else ""),
        closed_axes={**closed_axes(*opened), **model_closed, **whole_batch},
        tensor_limits=limits,
        remarks=(*unread_remark(objective, () if note else unread), *balance_remark(model, objective)),
        drawing=tuple(name for (name, _), count in zip(blocks, counts, strict=False) if count.draws or count.strays),
        grouped=tuple(name for (name, _), count in zip([*blocks, (REST, model)], counts, strict=True) if count.grouped),
    )


def _profiles(
    parts: Sequence[tuple[str, nn.Module]],
    counts: Sequence[Counts],
    experts: Mapping[str, nn.Module],
    routed: Mapping[str, int],
    rows: int,
    axes: tuple[str, ...],
) -> list[BlockProfile]:
    """Return the profiles of a model's parts, the rest of it last; a parameter counts where it is met first."""
    profiles: list[BlockProfile] = []
    owners: dict[int, str] = {}
    seen: set[str] = set()
    for (name, block), count in zip(parts, counts, strict=True):
        own = {id(parameter): parameter.numel() for parameter in block.parameters()}
        parameters = sum(size for key, size in own.items() if key not in owners)
        tied_to = next((owners[key] for key in own if key in owners and name != REST), "")
        owners = {**dict.fromkeys(own, name), **owners}
        inside = [key for key in experts if key.startswith(f"{name}.") or (name == REST and key not in seen)]
        seen.update(inside)
        profile = _block(name, count, parameters, rows, axes, tied_to)
        profiles.append(
            _with_experts(profile, [experts[key] for key in inside], sum(routed[key] for key in inside), rows)
        )
    return profiles


def _block(name: str, counts: Counts, parameters: int, rows: int, axes: tuple[str, ...], tied_to: str) -> BlockProfile:
    """Return a block's profile per sample; fp32 elements of one kind count as two of the compute dtype in another."""
    inputs = counts.input_elements / rows
    return BlockProfile(
        name=name,
        kind="module",
        parameters=parameters,
        matmul_flops=counts.matmul_flops / rows,
        attention_flops=counts.attention_flops / rows,
        moved_elements=counts.moved_elements / rows,
        saved_elements=counts.saved_elements / rows,
        saved_fp32_elements=counts.saved_fp32_elements / rows,
        selective_elements=counts.product_elements / rows + inputs,
        input_elements=inputs,
        attention_out_elements=counts.attention_elements / rows,
        transient_elements=counts.largest_elements / rows,
        operators=counts.operators,
        unaligned_flops=counts.unaligned_flops / rows,
        unaligned_backward_flops=counts.unaligned_backward_flops / rows,
        matmul_width=round(math.exp(counts.log_width / counts.matmul_flops)) if counts.matmul_flops else 1,
        recomputable=name != REST,
        open_axes=axes,
        tied_to=tied_to,
    )


@contextlib.contextmanager
def _rows_to(experts: Mapping[str, nn.Module]) -> Iterator[dict[str, int]]:
    """Yield the elements that each module with experts was given in the passes inside the block."""
    given = dict.fromkeys(experts, 0)

    def look(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: given.update({name: _sent(module, [*args, *kwargs.values()])})

    handles = [module.register_forward_pre_hook(look(name), with_kwargs=True) for name, module in experts.items()]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def _sent(experts: nn.Module, given: list[Tensor]) -> int:
    """Return the elements sent to experts: of their rows, or, in transformers' way, of tokens once for each choice."""
    return given[0].numel() * (given[1].shape[-1] if is_routed(experts) else 1)


def _with_experts(profile: BlockProfile, experts: list[nn.Module], elements: int, rows: int) -> BlockProfile:
    """Return the profile with what its experts are; `elements` are those that all rows of the batch sent to them."""
    if not experts:
        return profile
    weights = [weight for module in experts for weight in module.parameters()]
    shared = set.intersection(*(set(weight.shape[1:]) for weight in weights))  # widths that all of them have
    return replace(
        profile,
        experts=weights[0].shape[0],
        expert_parameters=sum(weight.numel() for weight in weights),
        expert_widths=tuple(sorted(shared)),
        routed_elements=elements / rows,
    )


def _trace(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    experts: list[str],
    batch: object,
    objective: Callable[[nn.Module, Any], Any],
    build: Build | None,
    items: int,
) -> tuple[list[Counts], dict[str, int], str]:
    """Return the counts of the blocks and the rest, the elements that experts were given, and a note on estimates."""

    def traced(what: nn.Module, **how: Any) -> tuple[list[Counts], dict[str, int], str]:
        with _rows_to({name: what.get_submodule(name) for name in experts}) as routed:
            counts = trace(what, blocks, batch, objective, **how)
        if any(count.draws for count in counts):
            # For real, what is drawn may decide what is drawn next: by steady numbers it decides alike.
            steady = how["where"] == "real"

            def again(rows: object) -> list[Counts]:
                return trace(what, blocks, rows, objective, memory=False, steady=steady, **how)

            _note_strays(counts, lambda: again(batch) if steady else counts, lambda: again(with_one_more(batch)), batch)
        return counts, routed, ""

    errors: list[Exception] = []
    needed = REAL_COPIES * own_bytes(model)
    is_small = needed <= REAL_COPIES * MOST_BYTES and is_short(batch)
    small: list[dict[str, str | None]] = [{"where": "small"}] if is_small else []
    ways: tuple[dict[str, str | None], ...] = (*small, {"where": "fake"}, {"where": "fake", "compute": None})
    for how in ways:  # the last since FFT and complex views know no bf16
        try:
            return traced(model, **how)
        except (LateWeights, NoSum):
            raise
        except Exception as error:  # whatever a user's model raises on tensors without values
            errors += [error] if how["where"] == "fake" else []
    if needed > usable_memory_bytes():
        because = f"it asks for values ({_said(errors[0])}) and would need about {needed / 2**30:.0f} GiB to run here"
        return _estimated(model, blocks, experts, items, because)
    try:
        return traced(build() if build else copied(model).to("cpu"), where="real")
    except ConfigError:  # of ours: it says itself what to write
        raise
    except Exception as error:
        if torch.cuda.is_available():  # it may need a GPU's kernels; training there will tell
            return _estimated(model, blocks, experts, items, f"its forward pass failed on the CPU ({_said(error)})")
        if tells_of_flex_attention(str(error)):
            raise ConfigError(
                f"the model {type(model).__name__} cannot be traced", ON_GPUS_ALONE, PLAIN_ON_CPU
            ) from error
        raise ConfigError(
            f"the model {type(model).__name__} cannot be traced",
            f"its forward pass failed on a batch of the data, {_said(error)}{_and_without_values(error, errors[0])}",
            _way_out(model, error),
        ) from error


def _way_out(model: nn.Module, error: Exception) -> str:
    """Return what to try where a model's forward pass fails while it is watched."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return NEEDS_PLAIN_MODULES
    return NEEDS_GRADIENTS if is_of_no_gradient(error) else CALL_IT


def _note_strays(
    counts: list[Counts], same: Callable[[], list[Counts]], one_more: Callable[[], list[Counts]], batch: object
) -> None:
    """Add to the counts of each block its random numbers of no sample, found by a batch of one sample more."""
    rows = _rows(batch)
    try:
        few, more = same(), one_more()
    except Exception:  # it takes no such batch: training's own look says so
        return
    for count, one, other in zip(counts, few, more, strict=True):
        count.strays += of_no_sample(one.draws, other.draws, (rows, rows + 1))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _and_without_values(error: Exception, before: Exception) -> str:
    """Return what was raised on tensors without values, to be told after the rest; "" where it is the same."""
    return "" if _said(before) == _said(error) else f"; and on tensors without values, {_said(before)}"


def _estimated(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], experts: list[str], items: int, because: str
) -> tuple[list[Counts], dict[str, int], str]:
    """Return counts made from the weights alone, and the note that says so.

    A matrix of [out, ...] is taken to be multiplied once with every one of `items`, and to leave `out` elements of
    each, which one more operator reads and writes. Convolutions, which pass an item many times, do more.
    """
    seen: set[int] = set()
    counts = []
    for block in [*(block for _, block in blocks), model]:
        count = Counts()
        for weight in block.parameters():
            if id(weight) in seen or weight.dim() < 2:
                continue
            seen.add(id(weight))
            flops, out = 2.0 * weight.numel() * items, float(items * weight.shape[0])
            count.matmul_flops += flops
            count.log_width += flops * math.log(weight.numel()) / 2
            count.saved_elements += 2 * out
            count.product_elements += out
            count.moved_elements += 4 * out
            count.largest_elements = max(count.largest_elements, 2 * out)
            count.operators += 3
            count.input_elements = count.input_elements or float(items * weight.shape[1])
        counts.append(count)
    note = f"the model could not be traced: {because}; its time and memory are estimated from its weights alone"
    return counts, dict.fromkeys(experts, 0), note


def _rows(batch: object) -> int:
    rows = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1 or 0 in rows:
        found = ", ".join(map(str, sorted(rows))) or "no tensor"
        raise ConfigError(
            f"the example batch has first dimensions of {found}", "the first dimension must count samples",
            "batches whose tensors all have one row per sample",
        )  # fmt: skip
    return rows.pop()


def _unshared(model: nn.Module, objective: Callable[..., Any], batch: object) -> str:
    """Return why ranks cannot share the sequences of a batch, "" where they can."""
    if not is_transformers(model):
        return "" if can_share_sequences(model) and takes_sequence_parts(objective) else SEQUENCE_RULE
    return why_unshared(model, _length(batch)) if takes_sequence_parts(objective) else TOKEN_SUM_RULE


def _length(batch: object) -> int:
    """Return the tokens of a row, 1 where the batch has no "tokens"."""
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else 1


def _items(batch: object, rows: int) -> int:
    """Return the labels of one sample, or 1 where the batch does not say which part of it labels are."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return 1
    return labels.numel() // rows
