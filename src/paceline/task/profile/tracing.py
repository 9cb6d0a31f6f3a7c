"""Records what a module's forward pass computes, moves and keeps, block by block, without doing it.

The module runs on fake tensors: shapes and dtypes alone, no memory and no arithmetic (torch's FakeTensorMode), with
bf16 weights, so that what stays in fp32 whatever the compute dtype can be told from what does not. A small one runs on
tensors with values, which is sooner done (operators/for_real.py). Operators that know no bf16 (FFT, complex views) run
in the weights' own dtype, and a model that asks for values runs for real, as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import ConfigError
from paceline.foreign_errors import is_of_functional_transforms
from paceline.task.models.copied import copied
from paceline.task.profile.aligned import is_aligned
from paceline.task.profile.operators.drawing import belongs_to_samples
from paceline.task.profile.operators.draws import RandomCall, Steady, beside_torch, draw_of
from paceline.task.profile.operators.for_real import PassLimits, WithoutLooking, with_values
from paceline.task.profile.operators.recurrent import StepsAtOnce
from paceline.task.sums import as_sum

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

COMPUTE_DTYPE = torch.bfloat16
FREE_OPERATORS = {"_unsafe_view", "detach", "alias", "lift_fresh", "empty", "empty_like", "new_empty"}
LOOKUPS = {"embedding", "gather", "index", "index_select"}


@dataclass
class Counts:
    """What one block does in one forward pass of the whole example batch; FLOPs and elements, not bytes."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    moved_elements: float = 0.0
    saved_elements: float = 0.0  # in the compute dtype
    saved_fp32_elements: float = 0.0  # anything wider or not floating-point, in units of four bytes
    product_elements: float = 0.0  # outputs of matrix products and attention, which selective recompute keeps
    attention_elements: float = 0.0  # those of them that are attention's
    input_elements: float = 0.0
    largest_elements: float = 0.0  # read and written by the block's largest operator, weights and the batch aside
    operators: int = 0
    grouped: int = 0  # convolutions whose channels are in groups
    unaligned_flops: float = 0.0  # of products with such operands (aligned.py), in the forward pass
    unaligned_backward_flops: float = 0.0  # and in the backward pass
    log_width: float = 0.0  # sum over products of FLOPs * log(width)
    # Whether what is kept is a guess, all that operators gave: nobody may watch what transforms of torch.func keep.
    unwatched: bool = False
    strays: list[str] = field(default_factory=list)  # operators whose random numbers belong to no sample
    draws: list[RandomCall] = field(default_factory=list, repr=False)  # calls of those whose numbers can belong to some
    storages: list[Any] = field(default_factory=list, repr=False)  # keeps addresses from being used again


class LateWeights(ConfigError):
    """A model makes weights while it runs, which no optimizer has that was made before, or ties them then."""

    def __init__(self, model: str, name: str, is_tied: bool = False) -> None:
        what, because = (
            "makes",
            "this one would stay as it was drawn in a plain loop, and would be another on every rank",
        )
        if is_tied:
            what = "puts another parameter in the place of"
            because = "the one that was there is trained for nothing, and ranks hold parts of it"
        super().__init__(
            f"the forward pass of the model {model} {what} the parameter '{name}'",
            f"an optimizer trains the weights that there are when it is made: {because}",
            f"{'tie' if is_tied else 'make'} it in __init__; or a factory that calls the model once before it returns"
            " it",
        )


def trace(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    batch: Any,
    objective: Callable[[nn.Module, Any], tuple[Tensor, Tensor]],
    where: str = "fake",
    compute: torch.dtype | None = COMPUTE_DTYPE,
    memory: bool = True,
    steady: bool = False,
) -> list[Counts]:
    """Return the counts of every block and, last, of all that lies outside them.

    `where` is "small" for a copy with values, "fake" for one without, or "real": the model itself runs, on the CPU, so
    it must be a copy. `compute` is the dtype of the weights and inputs of a copy; None leaves each its own, as "real"
    does, and all floating-point tensors of the first weight's dtype then count as compute dtype. Without `memory`, what
    the backward pass needs is left out. With `steady`, of a run for real, random numbers are the same for any number of
    samples. Raises LateWeights where the forward pass makes or ties parameters, and of a small copy LooksAtValues.
    """
    is_real = where == "real"
    mode = _fake_mode() if where == "fake" else None
    replica = model if is_real else fake_copy(model, mode, compute)
    example = batch if is_real else tree_map(lambda leaf: _input(leaf, mode, compute), batch)
    if compute is None or is_real:
        compute = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    recorder = _Recorder([replica.get_submodule(name) for name, _ in blocks], replica, example, compute, where)
    context = nullcontext() if is_real else small() if mode is None else quiet(mode)
    with torch.random.fork_rng(), context:
        with (
            recorder.operators(Steady() if steady else None),
            torch.no_grad(),
            beside_torch(recorder.counts[-1].strays),
        ):
            built = dict(replica.named_parameters(remove_duplicate=False))
            as_sum(objective(replica, example), objective)
        _require_the_same(replica, built)
        if memory:
            _watch_kept(recorder, lambda: objective(replica, example))
    return recorder.counts


def _require_the_same(model: nn.Module, built: dict[str, nn.Parameter]) -> None:
    """Raise LateWeights where a model has other parameters than before its forward pass."""
    now = dict(model.named_parameters(remove_duplicate=False))
    if late := [name for name in now if name not in built]:
        raise LateWeights(type(model).__name__, late[0])
    if gone := [name for name, weight in built.items() if now.get(name) is not weight]:
        raise LateWeights(type(model).__name__, gone[0], is_tied=True)


def _watch_kept(recorder: _Recorder, run: Callable[[], object]) -> None:
    """Count what a forward pass keeps for the backward pass, or all that its operators give where none may watch."""
    try:
        with recorder.saved_tensors(), torch.enable_grad():
            run()
    except RuntimeError as error:
        if not is_of_functional_transforms(error):
            raise
        recorder.forget_kept()
        with recorder.results(), torch.enable_grad():
            run()


@contextmanager
def quiet(mode: FakeTensorMode) -> Iterator[None]:
    """Run on fake tensors. What a model raises there is told by who looks, not by torch's log, which has tracebacks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def unsaid(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(unsaid)
    try:
        with mode, StepsAtOnce():
            yield
    finally:
        log.removeFilter(unsaid)


@contextmanager
def small() -> Iterator[None]:
    """Run a small copy on tensors with values, at which nothing looks."""
    with WithoutLooking(), StepsAtOnce():
        yield


def _fake_mode() -> FakeTensorMode:
    from torch._subclasses.fake_tensor import FakeTensorMode  # with torch's compiler and sympy

    return FakeTensorMode(allow_non_fake_inputs=True)


def own_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, shared ones once; those on "meta" as if they were there."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


def fake_copy(model: nn.Module, mode: FakeTensorMode | None, compute: torch.dtype | None) -> nn.Module:
    """Return a copy whose parameters are fake CPU tensors in the compute dtype, shared where the model's are.

    Without a mode they have values.
    """
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = compute if compute and parameter.is_floating_point() else parameter.dtype
        copies[id(parameter)] = nn.Parameter(_like(parameter, dtype, mode), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():  # neither FSDP2 nor a cast unit changes a buffer's dtype
        copies[id(buffer)] = _like(buffer, buffer.dtype, mode)
    return copied(model, copies)


def _like(tensor: Tensor, dtype: torch.dtype, mode: FakeTensorMode | None) -> Tensor:
    if mode is None:
        return with_values(tensor, dtype)
    with mode:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def _input(leaf: Any, mode: FakeTensorMode | None, compute: torch.dtype | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return _like(leaf, compute if compute and leaf.is_floating_point() else leaf.dtype, mode)


class _Recorder:
    def __init__(self, blocks: list[nn.Module], model: nn.Module, batch: Any, compute: torch.dtype, where: str) -> None:
        self.counts = [Counts() for _ in range(len(blocks) + 1)]
        self._blocks = blocks
        self._current = [len(blocks)]  # a stack; the rest is last
        self._compute, self._where = compute, where
        held = [*model.parameters(), *model.buffers(), *(x for x in tree_leaves(batch) if isinstance(x, Tensor))]
        # Kept in any case, so not an activation; and what was counted already, by purpose.
        self._held = {_address(tensor) for tensor in held}
        self._counted: set[tuple[str, int]] = set()

    def operators(self, steady: Steady | None = None) -> AbstractContextManager:
        limits = PassLimits(self._held) if self._where == "small" else None
        return _Hooked(self, _OperatorMode(self, steady, limits))

    def saved_tensors(self) -> AbstractContextManager:
        return _Hooked(self, saved_tensors_hooks(self.save, lambda tensor: tensor), inputs=True)

    def results(self) -> AbstractContextManager:
        return _Hooked(self, _ResultsMode(self), inputs=True)

    def forget_kept(self) -> None:
        """Begin anew with what is kept, after a pass that has ended in its middle."""
        self._counted.clear()
        for counts in self.counts:
            counts.saved_elements = counts.saved_fp32_elements = counts.input_elements = 0.0
            counts.unwatched = True

    @property
    def now(self) -> Counts:
        return self.counts[self._current[-1]]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, a buffer or of the batch."""
        return _address(tensor) in self._held

    def enter(self, index: int, tensors: Iterable[Any]) -> None:
        self._current.append(index)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and self._is_new(tensor, "input"):
                self.now.input_elements += tensor.numel()

    def leave(self) -> None:
        self._current.pop()

    def _is_new(self, tensor: Tensor, purpose: str) -> bool:
        try:
            address = _address(tensor)
        except NotImplementedError:  # a block inside of a transform of torch.func, whose tensors have no storage
            return False
        key = (purpose, address)
        if key in self._counted or address in self._held:
            return False
        self._counted.add(key)
        self.now.storages.append(tensor.untyped_storage())
        return True

    def save(self, tensor: Tensor) -> Tensor:
        if self._is_new(tensor, "saved"):
            size = tensor.untyped_storage().nbytes()  # a view keeps the whole storage
            if tensor.dtype == self._compute:
                self.now.saved_elements += size / tensor.element_size()
            else:
                self.now.saved_fp32_elements += size / 4
        return tensor


class _Hooked:
    """Enters a context with hooks on the blocks that tell the recorder where it is."""

    def __init__(self, recorder: _Recorder, inner: Any, inputs: bool = False) -> None:
        self._recorder, self._inner, self._inputs = recorder, inner, inputs
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for index, block in enumerate(self._recorder._blocks):

            def enter(module: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
                self._recorder.enter(index, tree_leaves((args, kwargs)) if self._inputs else ())

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                self._recorder.leave()

            self._handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(leave, always_call=True))
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for handle in self._handles:
            handle.remove()


class _Uncompiled(TorchDispatchMode):
    """A mode under which nothing is compiled: torch would import its compiler to leave out what the mode does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _OperatorMode(_Uncompiled):
    def __init__(self, recorder: _Recorder, steady: Steady | None = None, limits: PassLimits | None = None) -> None:
        super().__init__()
        self._recorder, self._steady, self._limits = recorder, steady, limits
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if self._limits is not None:
            self._limits.check(func, args, kwargs)
        if self._steady is not None and torch.Tag.nondeterministic_seeded in func.tags:
            result = self._steady.run(name, func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if self._limits is not None:
            self._limits.made(outputs)
        if not outputs or func.is_view or name in FREE_OPERATORS:
            return result
        counts = self._recorder.now
        counts.operators += 1
        if torch.Tag.nondeterministic_seeded in func.tags:
            if belongs_to_samples(name):
                counts.draws.append(draw_of(name, args, outputs[0]))
            else:
                counts.strays.append(name)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        read = outputs if name in LOOKUPS else inputs  # of a table, only the rows that are looked up
        touched = sum(x.numel() for x in read + outputs)
        # What is there in any case does not come and go, and weights do not grow with the samples.
        short_lived = sum(x.numel() for x in read + outputs if not self._recorder.holds(x))
        counts.largest_elements = max(counts.largest_elements, short_lived)
        kept = sum(x.nbytes for x in outputs if x.is_floating_point()) / 2
        if name.startswith("_scaled_dot_product"):
            counts.attention_flops += _attention_flops(func, args, kwargs)
            counts.attention_elements += kept
        elif func.overloadpacket in self._formulas:
            flops = self._formulas[func.overloadpacket](*args, **kwargs, out_val=result)
            counts.matmul_flops += flops
            counts.log_width += flops * math.log(_width(name, inputs))
            if "conv" not in name:
                inner, outer = inputs[-1].shape[-2:]
                counts.unaligned_flops += flops * (not is_aligned(inner))
                counts.unaligned_backward_flops += flops * (not is_aligned(inner, outer))
            counts.grouped += _given(func, args, kwargs).get("groups", 1) > 1
        else:
            counts.moved_elements += touched
            return result
        counts.product_elements += kept
        return result


class _ResultsMode(_Uncompiled):
    """Counts all that operators give as kept."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.is_floating_point():
                self._recorder.save(output)
        return result


def _attention_flops(func: Any, args: tuple, kwargs: dict[str, Any]) -> float:
    """Return 2 FLOPs per product of query and key, and of weight and value; half of them where it is causal."""
    query, key, value = args[:3]  # [rows, heads, seq, head_dim]
    rows, heads, seq, width = query.shape
    flops = 2.0 * rows * heads * seq * key.shape[2] * (width + value.shape[3])
    return flops / 2 if _given(func, args, kwargs).get("is_causal") else flops


def _given(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, without those that it was left to choose."""
    return {argument.name: given for argument, given in zip(func._schema.arguments, args, strict=False)} | kwargs


def _width(name: str, inputs: list[Tensor]) -> float:
    """Return the geometric mean of a product's inner and outer width."""
    if "conv" in name:
        weight = inputs[1]  # [out, in / groups, *kernel]
        return math.sqrt(weight.numel())
    right = inputs[-1]  # [..., inner, outer], also of addmm and baddbmm
    return math.sqrt(right.shape[-2] * right.shape[-1])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
