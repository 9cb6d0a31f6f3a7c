"""Batch normalisation over the whole batch: `nn.SyncBatchNorm` on any device, for any number of rows on a rank.

torch's own forward pass needs CUDA and a row on every rank. Modules of that class get another class here, with the
same parameters, buffers and names; run/parallel/data/statistics.py tells them how sums over the ranks come about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

AddUp = Callable[[Tensor], Tensor]  # a tensor of this rank's rows -> its sum over all ranks, with gradients


class WholeBatchNorm(nn.SyncBatchNorm):
    """Normalises by the statistics of all ranks' rows; those of a device that is alone are F.batch_norm's."""

    add_up: AddUp | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [rows, channels, ...] normalised, and keep running statistics as torch does."""
        self._check_input_dim(x)
        self._check_non_zero_input_channels(x)
        over_batch = takes_batch_statistics(self)
        tracks = self.track_running_stats or not self.training
        keeps = self.training and tracks and self.running_mean is not None
        # A forward pass that is made again keeps nothing: running statistics move by nothing.
        factor = self._count_batch() if keeps and not is_recomputed() else 0.0
        if over_batch and self.add_up is not None:
            return self._over_ranks(x, self.add_up, factor)
        mean, variance = (self.running_mean, self.running_var) if tracks else (None, None)
        if mean is None or self.weight is None or mean.dtype == self.weight.dtype:
            return F.batch_norm(x, mean, variance, self.weight, self.bias, over_batch, factor, self.eps)
        # Weights that were cast: torch's kernels on CPUs take none of another dtype than running statistics.
        wide, weight, bias = (each.to(mean.dtype) for each in (x, self.weight, self.bias))
        return F.batch_norm(wide, mean, variance, weight, bias, over_batch, factor, self.eps).to(x.dtype)

    def _count_batch(self) -> float:
        """Count one more batch and return how much its statistics weigh in the running ones."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _over_ranks(self, x: Tensor, add_up: AddUp, factor: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        over = [at for at in range(x.dim()) if at != 1]
        shape = [-1 if at == 1 else 1 for at in range(x.dim())]
        own = x.numel() // x.shape[1]
        first = add_up(torch.cat((wide.new_tensor([own]), wide.sum(over))))
        count = first[0].detach()
        if own == 1 and float(count) == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        mean = first[1:] / count
        centred = wide - mean.view(shape)
        squares = add_up(centred.square().sum(over))
        if factor:
            self._keep(mean.detach(), squares.detach() / (count - 1), factor)
        scale = torch.rsqrt(squares / count + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = 0.0 if self.bias is None else self.bias.view(shape)
        return (centred * scale.view(shape) + shift).to(x.dtype)

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, factor: float) -> None:
        """Move the running statistics towards a batch's mean and unbiased variance."""
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.mul_(1 - factor).add_(new.to(running.dtype), alpha=factor)


def adopt_synced(model: nn.Module) -> nn.Module:
    """Return the model, whose modules of `nn.SyncBatchNorm` itself over all ranks are now of the class above."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm and module.process_group is None:
            module.__class__ = WholeBatchNorm
    return model


def takes_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch normalisation that reads its statistics from the batch, in its mode of now."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def whole_batch_norms(model: nn.Module) -> Iterator[WholeBatchNorm]:
    """Yield the modules whose statistics are over the rows of all ranks."""
    for module in model.modules():
        if isinstance(module, WholeBatchNorm) and takes_batch_statistics(module):
            yield module


def sees_whole_batch(model: object) -> bool:
    """Return whether the rows of a batch see each other in a model's normalisation, over all ranks."""
    return isinstance(model, nn.Module) and next(whole_batch_norms(model), None) is not None


def is_recomputed() -> bool:
    """Return whether a backward pass is running, in which a forward pass is one made again."""
    return torch._C._current_graph_task_id() != -1
