"""Optimizers that Paceline knows nothing of, as a library or a user would write them."""

from __future__ import annotations

from typing import Any

import torch


class Counting(torch.optim.Optimizer):
    """Element by element, with a count of steps that is a number of Python's, and no state before the first step."""

    def __init__(self, params: Any, lr: float, power: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "power": power, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        state.setdefault("step", 0)
        state.setdefault("total", torch.zeros_like(weight))
        state["step"] += 1
        state["total"] = state["total"] + weight.grad.square()  # a new tensor every step
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] * weight.grad / (state["total"] / state["step"] + 1e-4) ** group["power"])


class Centred(Counting):
    """Takes the mean of each column from a gradient, as GC does: it needs whole columns."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.dim() > 1:
            weight.grad -= weight.grad.mean(0, keepdim=True)
        super().update(weight, group)


class Trusting(Counting):
    """Scales every update by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        norm = torch.stack([w.grad.norm() for w in weights]).norm()
        for weight in weights:
            weight.grad /= norm
        super().step()


class Noisy(Counting):
    """Adds noise to the update."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        weight.grad += 0.1 * torch.randn_like(weight.grad)
        super().update(weight, group)


class Closing(torch.optim.SGD):
    """Evaluates its loss by itself, as sharpness-aware ones do."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        """Update every weight, once the loss was evaluated."""
        closure()
        super().step()


class Late(Counting):
    """Takes the mean of columns from the twentieth update on, as preconditioners wait until they have seen enough."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.dim() > 1 and self.state[weight].get("step", 0) >= 20:
            weight.grad -= weight.grad.mean(0, keepdim=True)
        super().update(weight, group)


class CountingInGroups(Counting):
    """Counts its steps in its groups, as schedule-free ones do: updates become smaller by it."""

    def __init__(self, params: Any, lr: float, power: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, power, weight_decay)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
        super().step(closure)

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        weight.grad /= group["k"]
        super().update(weight, group)


class Slow(Counting):
    """Keeps slow weights and a count beside its state, as Lookahead does, and goes back to them every fifth update."""

    def __init__(self, params: Any, lr: float, power: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, power, weight_decay)
        self.steps, self.slow = 0, [w.detach().clone() for group in self.param_groups for w in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        weights = [w for group in self.param_groups for w in group["params"]]
        for weight, slow in zip(weights, self.slow, strict=True):
            if self.steps % 5 == 0:
                weight.copy_(slow.lerp_(weight, 0.5))


class Listing(Counting):
    """Keeps a list of tensors in its state."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[weight]["seen"] = [weight.grad.mean()]
        super().update(weight, group)


class Asserting(Counting):
    """Says by an assertion that it wants the loss once more, as sharpness-aware ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "requires closure, but it was not provided"
        super().step()


class Tamed(Counting):
    """Takes an update down to a bound of its norm, which hardly any reaches: a spike of one weight's gradient."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        weight.grad *= min(1.0, 1e3 / float(weight.grad.norm()))
        super().update(weight, group)


class Skipping(Counting):
    """Leaves out an update whose gradients have a large norm together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        if float(torch.stack([w.grad.norm() for w in weights]).norm()) < 1e3:
            super().step()


class ForKernels(Counting):
    """Normalises the gradients of kernels of convolutions, and of nothing else."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.dim() == 4:
            weight.grad /= weight.grad.norm() + 1e-8
        super().update(weight, group)


class ForWideMatrices(Counting):
    """Scales rows of a matrix of 128 rows and columns, or more, by their means, as rules that factor moments do."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.dim() == 2 and min(weight.shape) >= 128:
            weight.grad /= weight.grad.abs().mean(0, keepdim=True) + 1e-8
        super().update(weight, group)


class Refusing(Counting):
    """Stops a run whose gradients have grown too large."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if float(weight.grad.norm()) > 1e4:
            raise ValueError("gradients have exploded")
        super().update(weight, group)


class ByPlace(Counting):
    """Has a smaller rate for each further parameter of its list, as rates by depth are written by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for at, weight in enumerate(w for group in self.param_groups for w in group["params"]):
            if weight.grad is not None:
                weight.grad *= 0.8**at
        super().step()


class Regrouping(Counting):
    """Makes a group with a rate of its own of each parameter that it is given."""

    def __init__(self, params: Any, lr: float) -> None:
        own = [weight for group in params for weight in group["params"]]
        super().__init__([{"params": [weight], "lr": lr * 0.8**at} for at, weight in enumerate(own)], lr)


class FasterVectors(Counting):
    """Gives one of its groups another rate than the one that it was given."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[-1]["lr"] = 2 * lr


class RateInATensor(Counting):
    """Keeps the rates of its groups in tensors of fp32, which the digits of a number of Python's do not all go into."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])


class OfLargeMatrices(Skipping):
    """Takes no matrix of fewer than 32 rows or columns, as projections to so many do not."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.dim() != 2 or min(weight.shape) < 32:
            raise ValueError(f"a projection of rank 32 of {list(weight.shape)}")
        weight.grad -= weight.grad.mean(0, keepdim=True)
        super().update(weight, group)


class TamedIfLarge(Counting):
    """Takes updates of 4,096 elements and more down to a bound of their norm, and leaves those of fewer."""

    def update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        if weight.numel() >= 4096:
            weight.grad *= min(1.0, 1e3 / float(weight.grad.norm()))
        super().update(weight, group)
