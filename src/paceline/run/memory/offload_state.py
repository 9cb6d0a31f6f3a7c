"""The optimizer's state in host memory: it visits the device once a step, a bucket at a time, for the update.

The update itself runs on the device, by the same kernel on the same numbers: weights are those of an optimizer whose
state never leaves, bit for bit, and so are checkpoints. On a CPU the state that visits is a copy too. On CUDA copies
have a stream of their own: while one bucket is updated the next one comes and the one before goes home.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint import materialise_optimizer_state
from paceline.task.models.held import local_of

Visiting = dict[nn.Parameter, dict[str, Any]]  # state on the device, by name


@dataclass(frozen=True)
class _Bucket:
    """Some parameters of one group, and an optimizer of the same kind for them alone."""

    group: dict[str, Any]  # of the optimizer that holds the state; its options count
    parameters: list[nn.Parameter]
    worker: torch.optim.Optimizer


class OffloadedUpdate:
    """Updates weights with an optimizer whose state rests in host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, bucket_bytes: int) -> None:
        """Visits take `bucket_bytes` of state at a time; one weight's at least."""
        self.optimizer = optimizer
        materialise_optimizer_state(optimizer, torch.device("cpu"))
        for parameter in optimizer.state:
            if parameter.device.type == "cuda":
                for name in self._offloaded(parameter):
                    _pin(local_of(optimizer.state[parameter][name]))
        kind: Any = type(optimizer)
        on_cuda = {p.device for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
        self._stream = torch.cuda.Stream(on_cuda.pop()) if on_cuda else None
        bucket_bytes //= 2 if self._stream else 1  # two are on the device at a time
        self._buckets = [
            _Bucket(group, parameters, kind([{**group, "params": parameters}]))
            for group in optimizer.param_groups
            for parameters in self._filled(group["params"], bucket_bytes)
        ]

    def step(self) -> None:
        """Update every weight that has a gradient. The state is home when this returns: anybody may read it then."""
        coming = self._fetch(self._buckets[0]) if self._buckets else {}
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            visiting = self._arrived(coming)
            coming = self._fetch(following) if following else {}
            bucket.worker.param_groups[0].update({k: v for k, v in bucket.group.items() if k != "params"})
            for parameter, state in visiting.items():
                bucket.worker.state[parameter] = {**self.optimizer.state[parameter], **state}
            bucket.worker.step()
            self._send_home({parameter: bucket.worker.state.pop(parameter) for parameter in visiting})
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(self, bucket: _Bucket) -> Visiting:
        """Return the state of a bucket's weights that have a gradient, on its way to the device."""
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            return {
                parameter: {
                    name: _copied(self.optimizer.state[parameter][name], parameter.device)
                    for name in self._offloaded(parameter)
                }
                for parameter in bucket.parameters
                if parameter.grad is not None
            }

    def _arrived(self, visiting: Visiting) -> Visiting:
        """Return state that is on its way, for the stream that computes."""
        if self._stream is not None:
            computing = torch.cuda.current_stream(self._stream.device)
            computing.wait_stream(self._stream)
            for state in visiting.values():
                for value in state.values():
                    local_of(value).record_stream(computing)
        return visiting

    def _send_home(self, visited: Visiting) -> None:
        """Copy state back to where it rests."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            for parameter, state in visited.items():
                for name in self._offloaded(parameter):
                    updated = local_of(state[name])
                    local_of(self.optimizer.state[parameter][name]).copy_(updated, non_blocking=True)
                    if self._stream is not None:  # an optimizer that makes new tensors has made them on another stream
                        updated.record_stream(self._stream)

    def _filled(self, parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
        """Return the parameters in runs whose state is about `limit` bytes at most."""
        runs: list[list[nn.Parameter]] = []
        size = 0
        for parameter in parameters:
            own = sum(local_of(self.optimizer.state[parameter][name]).nbytes for name in self._offloaded(parameter))
            if not runs or size + own > limit:
                runs.append([])
                size = 0
            runs[-1].append(parameter)
            size += own
        return runs

    def _offloaded(self, parameter: Tensor) -> list[str]:
        """Return the names of a parameter's state that rests on the host: all but the count of steps."""
        return [name for name, value in self.optimizer.state[parameter].items() if name != "step" and value is not None]


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Return another tensor with the same values, on the device."""
    return value.to(device, non_blocking=True, copy=True)


def _pin(tensor: Tensor) -> None:
    """Lock a tensor's memory in place, so that the device copies from and to it by itself, as long as it lives.

    Of a DTensor torch allocates no pinned memory, so what there is gets registered with the driver.
    """
    if not tensor.numel():
        return
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 0)))
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
