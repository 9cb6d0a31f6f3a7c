"""Stands in for torch's random operators during a micro-batch: what they return belongs to the samples.

Each call of an operator takes one number, the call's key, from torch's own generator on the CPU, which starts every
micro-batch at the same place: a function of the seed and the step. So the order of calls is all that tells them apart,
on every rank and for every micro-batch; what replays torch's random state, as activation checkpointing does, replays
the keys, and a pipeline hands them on from stage to stage. Values are hashed from key, sample and place (hashing.py).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from paceline.errors import ConfigError
from paceline.run.numerics.randomness.hashing import fill
from paceline.run.numerics.randomness.operators import RandomOperators, drawing_functions, keep
from paceline.run.numerics.randomness.seeds import seed_at, seed_device
from paceline.run.numerics.randomness.shares import Pattern, RankPart, SampleRows, Share, guessed, share_of
from paceline.run.numerics.randomness.sites import Site, site_of_caller, where
from paceline.said import OwnWarning


@dataclass(frozen=True)
class Survey:
    """What a look at a program has told of its random numbers."""

    patterns: dict[Site, tuple[Pattern, ...]] = field(default_factory=dict)
    strays: tuple[str, ...] = ()  # random numbers that belong to no sample, in words
    modules: tuple[type, ...] = ()  # kinds of modules that draw in their own forward pass
    unread: tuple[str, ...] = ()  # entries of the batch that the objective did not read
    failed: str = ""  # what the program said to other numbers of samples, where it does not take them
    unseen: bool = False  # whether it did not come to the end on any number of samples
    silent: bool = False  # whether it is known to draw nothing: torch's random states alone are watched then

    def patterns_of(self, site: Site) -> tuple[Pattern, ...]:
        """Return the patterns seen at a site; those of all sites where it was not come to."""
        return self.patterns.get(site) or tuple({p for at in self.patterns.values() for p in at})

    @property
    def is_cut_freely(self) -> bool:
        """Whether the program draws for samples, and takes any number of them."""
        return bool(self.patterns) and not self.failed

    @property
    def drew_nothing(self) -> bool:
        """Whether the program came to its end in a look, and drew nothing."""
        return not (self.patterns or self.strays or self.modules or self.failed or self.unseen)

    @property
    def why_unknown(self) -> str:
        """Why nobody has seen whose the random numbers of a place are."""
        if self.failed and not self.patterns:
            return f"the program could not be looked at with other numbers of samples, {self.failed}"
        return "the look at two samples and at three did not come there"


class SampleRandomness(TorchFunctionMode):
    """Within it, random numbers of the micro-batch that was begun last belong to its samples.

    `strict` makes random numbers that do not an error; otherwise they are warned of, once.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        survey: Survey,
        part: RankPart | None = None,
        strict: bool = True,
    ) -> None:
        super().__init__()
        self.survey = survey
        self._seed, self._device, self._part, self._strict = seed, device, part or RankPart(), strict
        self._functions = drawing_functions()
        self._operators = RandomOperators(self)
        self._shares: dict[object, Share] = {}
        self._told: dict[str, str] = {}
        self._rows: SampleRows | None = None
        self._began, self._calls, self._entered = torch.Tensor(), 0, 0
        self._is_forward = False
        self._silent = survey.silent
        self._ended: Tensor | None = None  # random states at the end of the last forward pass

    # ---- the micro-batch -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def during(self, rows: SampleRows) -> Iterator[None]:
        """Make the random numbers of a forward pass those of its samples; at the end see that none went past us."""
        self.begin(rows)
        self._is_forward = True
        try:
            with contextlib.nullcontext() if self._silent else self:
                yield
        finally:
            self._is_forward = False
        self._ended = self.check()

    def __enter__(self) -> SampleRandomness:
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        super().__exit__(*error)

    @property
    def is_entered(self) -> bool:
        """Whether torch's random functions go through it now."""
        return self._entered > 0

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Enter where torch has left the mode behind: in compiled code, or in a part that is run again.

        What is drawn again is no new call: torch's random state is where the part began, and goes back.
        """
        calls = self._calls
        with self:
            yield
        self._calls = self._calls if self._is_forward else calls

    @property
    def is_forward(self) -> bool:
        """Whether a forward pass runs, and no part of it once more in a backward pass."""
        return self._is_forward

    @property
    def rows(self) -> SampleRows | None:
        """The samples that are drawn for."""
        return self._rows

    @contextlib.contextmanager
    def turned_to(self, rows: SampleRows | None) -> Iterator[None]:
        """Draw for other samples for a while."""
        before, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = before

    def begin(self, rows: SampleRows) -> None:
        """Start the random numbers of a micro-batch."""
        seed_device(seed_at(self._seed, rows.step), self._device)
        self.turn_to(rows)
        self.went_on()

    def rest(self) -> None:
        """Draw for no samples until the next micro-batch: a model that is called meanwhile is torch's own affair.

        Backward passes are over: what they drew anew has come to no sample. Parts that are run again put states back.
        """
        self._rows, ended, self._ended = None, self._ended, None
        if ended is not None and not torch.equal(ended, _states(self._device)):
            self.stray("the backward pass", "a hook or a function of the program draws there, outside of any sample")

    def turn_to(self, rows: SampleRows) -> None:
        """Go on with these samples: a backward pass that runs blocks again comes after other micro-batches."""
        self._rows = rows

    def went_on(self) -> None:
        """Note that torch's random state was set to where the calls of these samples go on."""
        self._began, self._calls = _states(self._device), 0

    @property
    def has_drawn(self) -> bool:
        """Whether anything was drawn since the micro-batch began."""
        return self._calls > 0

    def check(self) -> Tensor:
        """Tell of random numbers that were drawn since the micro-batch began and were not calls' keys.

        Returns torch's random states as they are now.
        """
        expected, now = self._began, _states(self._device)
        if self._calls:
            generator = torch.Generator()
            size = generator.get_state().numel()
            generator.set_state(self._began[:size])
            torch.empty(self._calls, dtype=torch.int64, device="cpu").random_(generator=generator)
            expected = torch.cat([generator.get_state(), self._began[size:]])
        if not torch.equal(expected, now):
            self.stray("an operator that torch does not name", "it takes its random numbers past torch's functions")
        return now

    def stray(self, name: str, because: str) -> None:
        """Make random numbers that belong to no sample an error, or a warning."""
        if self._strict:
            raise stray_error([f"{name}: {because}"])
        self._silent = False  # what draws once may draw again, and then for its samples
        self._tell(name, because, "random numbers of {} follow the micro-batch: {}")

    def _tell(self, name: str, because: str, text: str) -> None:
        """Warn of random numbers, once; the name and the reason stand in `told` too."""
        if name not in self._told:
            self._told[name] = because
            warnings.warn(text.format(name, because), OwnWarning, stacklevel=2)

    @property
    def told(self) -> tuple[str, ...]:
        """What was warned of since it was made: random numbers whose owner is not known for sure."""
        return tuple(f"{name}: {because}" for name, because in self._told.items())

    # ---- what torch calls ------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func not in self._functions:
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> object:
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
            if not _attention_drops(func, args, kwargs):
                return func(*args, **kwargs)
            with sdpa_kernel(SDPBackend.MATH), self._operators:  # fused kernels draw by themselves
                return func(*args, **kwargs)
        if func in RECURRENT and not _recurrent_drops(args):
            return func(*args, **kwargs)
        with self._operators:
            return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0.0 < p <= 1.0 or input.device.type == "meta":
            return F.dropout(input, p, training, inplace)  # which also says what is wrong with p
        noise = torch.empty_like(input, requires_grad=False, memory_format=torch.contiguous_format)
        keep(self, noise, 1.0 - p, 1.0 / (1.0 - p) if p < 1.0 else 0.0)
        return input.mul_(noise) if inplace else input * noise

    # ---- what operators ask for ------------------------------------------------------------------------------------

    def __call__(self, out: Tensor, lanes: int, finish: Callable[..., object]) -> Tensor:
        """Fill `out`, which is contiguous, by a new call."""
        assert self._rows is not None
        key = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._calls += 1
        if not out.numel():
            return out
        share = self._share(tuple(out.shape), out.device)
        owners = share.owners(self._rows)
        if share.in_order:
            fill(out.view(len(owners), -1), key, owners, share.places, lanes, finish, share.inner)
            return out
        flat = out.new_empty(len(owners), out.numel() // len(owners))
        fill(flat, key, owners, share.places, lanes, finish, share.inner)
        return out.copy_(share.restored(flat, out.shape))

    def calls(self, numbers: dict[str, float]) -> None:
        """With which numbers an operator is called is looked at before training."""

    def draws_apart(self, generator: torch.Generator) -> None:
        """Generators of the program's own are left alone: they are looked at before training."""

    def drew_apart(self, out: object) -> None:
        """What a generator of the program's own has drawn is left alone, as the generator is."""

    def _share(self, shape: tuple[int, ...], device: torch.device) -> Share:
        assert self._rows is not None
        site = site_of_caller()
        known = (site, shape, len(self._rows), self._rows.length, device)
        if known not in self._shares:
            share = self._found(site, shape)
            places = None if share.places is None else share.places.to(device)
            self._shares[known] = Share(share.dim, share.inner, places, share.apart)
        return self._shares[known]

    def _found(self, site: Site, shape: tuple[int, ...]) -> Share:
        assert self._rows is not None
        patterns = self.survey.patterns_of(site)
        share = share_of(shape, self._rows, patterns, self._part) if patterns else None
        if share is None and not patterns:
            share = guessed(shape, len(self._rows))
            if share is not None and share.dim is not None and not self._part.is_whole:
                share = None  # a rank's part of a slice of which nobody has seen the whole
        if share is not None and site not in self.survey.patterns:
            owner = "all samples alike" if share.dim is None else f"samples along dimension {share.dim}"
            self._tell(where(site), f"{self.survey.why_unknown}: they are taken to be those of {owner}", GUESSED)
        if share is None:
            self.stray(
                f"{where(site)}", f"a random tensor of shape {list(shape)} for {len(self._rows)} samples"
                " has no dimension that counts them",
            )  # fmt: skip
            share = Share(0 if shape and shape[0] % len(self._rows) == 0 else None, shape, None)
        return share


RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _recurrent_drops(args: Sequence[object]) -> bool:
    """Return whether a recurrent layer drops: after `has_biases`, its first flag, come `num_layers, dropout, train`."""
    at = next((place for place, value in enumerate(args) if isinstance(value, bool)), len(args))
    dropout, trains = (*args[at + 2 : at + 4], None, None)[:2]
    return not (dropout == 0 or trains is False)  # of what is named, which is not looked at, it may


GUESSED = "random numbers of {}, whose owner is a guess: {}"


def stray_error(strays: list[str] | tuple[str, ...]) -> ConfigError:
    """Return the error for random numbers that no layout could repeat."""
    return ConfigError(
        "the model draws random numbers that belong to no sample: " + "; ".join(strays),
        "they would be others on every layout and for every size of the micro-batch",
        "torch's own functions on tensors whose one dimension counts samples, or one device and one micro-batch a step",
    )


def _states(device: torch.device) -> Tensor:
    """Return torch's random states on the CPU and on `device`, uint8, on the CPU."""
    state = torch.default_generator.get_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.default_generators[device.index].get_state()])
    return state


def _attention_drops(func: object, args: Any, kwargs: dict[str, object]) -> bool:
    if func is F.multi_head_attention_forward:
        probability = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
        training = args[13] if len(args) > 13 else kwargs.get("training", True)
        return bool(probability and training)
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
