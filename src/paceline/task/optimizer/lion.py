"""Lion: the sign of an interpolation of momentum and gradient (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch

from paceline.task.optimizer.eager import EagerOptimizer


class Lion(EagerOptimizer):
    """Updates by `sign(beta1 m + (1 - beta1) g)`, then `m = beta2 m + (1 - beta2) g`; weight decay is decoupled."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any]) -> None:
        """Give weights with a gradient the state of the first update, as the optimizers of torch do."""
        for weight in group["params"]:
            if weight.grad is not None and not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight, memory_format=torch.preserve_format)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # a loss is of no use here
        """Update every weight that has a gradient."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                self._init_group({"params": [weight]})
                momentum = self.state[weight]["momentum"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(momentum.lerp(weight.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - beta2)
