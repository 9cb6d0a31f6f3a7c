"""Whether split layers compute what whole ones do: a user's rules are tried on one micro-batch before training starts.

A rule can fit its layer and be wrong all the same: `column` on a matrix that holds gates and up-projections gives one
rank all gates, and a head count that nobody declared lets a cut go through a head. Nothing of this fails; the numbers
are others. So the outputs of the layers at which parts are summed are compared with those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.foreign_errors import is_of_machine
from paceline.task.models.build import evaluating
from paceline.task.models.held import buffers_kept
from paceline.task.models.layers.collectives import part
from paceline.task.rules import Rules

ENDS = ("row", "split_row", "gathered")  # styles after which an activation is whole, or split along the sequence alone
# Norm of the difference over the norm, as `verify` allows of gradients in fp32, in which models of any dtype may
# compute their norms. A layer that is cut wrongly is off by about one.
RELATIVE = 1e-4


class SplitCheck:
    """Keeps the outputs of a whole model's layers and holds those of the split model against them."""

    def __init__(self, model: nn.Module, rules: Rules, forward: Callable[[], object]) -> None:
        """Run the whole model once. `forward` calls the objective on one micro-batch; ranks that share layers alike."""
        self._forward, self._rules = forward, rules
        self._whole = self._outputs(model)

    def of(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Raise ConfigError where the model, now split over the group, gives another output at one of its layers."""
        try:
            found = self._outputs(model)
        except ConfigError:  # which says itself what to do
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # of shapes that do not fit any more
            if is_of_machine(error):  # a smaller micro-batch goes on, or another world
                raise
            raise self._refusal(model, group, f"its forward pass fails, {type(error).__name__}: {error},") from error
        for name, whole in self._whole.items():
            own = part(whole, group) if self._rules.splits_sequence and whole.shape != found[name].shape else whole
            same = own.shape == found[name].shape
            if not same or float((found[name] - own).norm()) > RELATIVE * float(own.norm()):
                raise self._refusal(model, group, f"the output of '{name}' is another")

    def _refusal(self, model: nn.Module, group: dist.ProcessGroup, what: str) -> ConfigError:
        return ConfigError(
            f"the rules of {type(model).__name__} do not compute what the model does",
            f"{what} when layers are split over tp = {group.size()}: a 'column' is cut into one piece for every rank,"
            " which is wrong for a matrix that holds several (queries, keys and values, or gates), and a degree must"
            " divide all heads",
            "the style 'fused' with `parts` for such a matrix, `counts` for heads, or tp = 1",
        )  # fmt: skip

    def _outputs(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what the layers at the ends of split regions give, of the first row, by name."""
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def look(module: nn.Module, args: object, out: Tensor) -> None:
                outputs.setdefault(name, out.detach()[:1].clone())  # of a module that is called twice, the first

            return look

        ends = [(name, module) for name, module in model.named_modules() if self._rules.style_of(name) in ENDS]
        handles = [module.register_forward_hook(keep(name)) for name, module in ends]
        try:
            with quiet(model), torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(0)
                self._forward()
        finally:
            for handle in handles:
                handle.remove()
        return outputs


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Have every module in eval mode for a while: no dropout; each gets its own mode back."""
    with evaluating(model), buffers_kept(model):
        yield
