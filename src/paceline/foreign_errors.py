"""The words of other people's errors that have no type of their own: of torch, its allocators, gloo and gcsfs.

No other file knows such words: each asks here what an error says. Whose words they are, and of which version they were
read, stands beside them.
"""

from __future__ import annotations

import errno
import os
import re

# What allocators say, in lower case, where they raise a RuntimeError: torch's of a CPU (c10/core/impl/alloc_cpu.cpp),
# those of devices ("MPS backend out of memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
# libraries that ask by themselves (CUBLAS_STATUS_ALLOC_FAILED), and the system (mmap).
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc",
    "status_alloc_failed",
)  # fmt: skip
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_FACTORS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# gloo begins with the line of its source that raises: "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]
# Connection closed by peer", or names it behind "Gloo connectFullMesh failed with". torch 2.13's own words of gloo, as
# "ProcessGroupGloo::alltoall: ...", are of wrong calls.
_OF_GLOO = re.compile(r"\bgloo/[\w./-]+\.(?:cc|h|cpp):\d+")
# What the system says of a process that has no file descriptor left, in torch's errors of a store that is a file.
_NO_DESCRIPTOR = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))
# Kinds of errors of torch.distributed, of NCCL among others, and of devices.
_OF_MACHINES = ("DistError", "AcceleratorError")
# torch, of a group that this process has left while one of its threads was in it (distributed_c10d.py, get_backend).
_LEFT_GROUP = "is not initialized in the world group map"
# Where tensors of two devices meet: of kernels, of torch's operators in Python, of tensors without values.
_TWO_DEVICES = ("on the same device", "is not on the expected device", "found two different devices")
_LET_GO = "storage of size 0"  # in what torch says of a tensor whose memory FSDP2 has given back
# In what torch says of an operator that takes plain tensors with shards, has no rule for shards, or none that fits.
_SHARDS = ("DTensor", "does not have a sharding strategy", "Sharding propagation failed")
_INFERENCE = (
    "nference tensor"  # "Inplace update to inference tensor outside InferenceMode", "Inference tensors cannot be"
)
_NO_GRADIENT = "does not require grad"  # "element 0 of tensors does not require grad and does not have a grad_fn"
_SECOND = re.compile(r"derivative for aten::\w+ is not implemented")  # of an operator's own backward pass
_FUNCTIONAL = ("torch.func", "saved tensor hooks")  # what torch.func transforms cannot be watched for what they keep
# torch 2.13 of flex_attention where weights are trained on a CPU, and where operators are watched.
_FLEX = ("FlexAttention does not support backward on CPU", "no rule registered for HigherOrderOperator flex_attention")
ON_GPUS_ALONE = "flex_attention has a backward pass on GPUs alone"
PLAIN_ON_CPU = (
    "torch.nn.functional.scaled_dot_product_attention where tensors are on a CPU, with the mask written out: plans and"
    " proofs compute there"
)


def says_no_memory(error: BaseException) -> bool:
    """Return whether a RuntimeError says that an allocator has no memory left."""
    return isinstance(error, RuntimeError) and tells_no_memory(str(error))


def tells_no_memory(text: str) -> bool:
    """Return whether the text of a RuntimeError says that an allocator has no memory left."""
    return any(words in text.lower() for words in _NO_MEMORY)


def asked_bytes(error: BaseException) -> int | None:
    """Return for how many bytes an allocator was asked that had them not; None where the error does not say it."""
    found = _ASKED.search(str(error))
    return round(float(found[1]) * _FACTORS[found[2]]) if found else None


def is_of_gloo(error: BaseException) -> bool:
    """Return whether gloo has raised an error: a peer has gone, or did not answer in time."""
    return isinstance(error, RuntimeError) and _OF_GLOO.search(str(error)) is not None


def is_of_no_descriptor(error: BaseException) -> bool:
    """Return whether a store could not be opened since this process has no file descriptor left: that may pass."""
    return isinstance(error, RuntimeError) and any(told in str(error) for told in _NO_DESCRIPTOR)


def is_of_machine(error: BaseException) -> bool:
    """Return whether an error is of memory, of a peer or of a device, and not of what a program computes."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return says_no_memory(error) or is_of_gloo(error) or not kinds.isdisjoint(_OF_MACHINES)


def is_of_left_group(error: BaseException) -> bool:
    """Return whether torch says that this process has left the group that a call was for."""
    return isinstance(error, ValueError) and _LEFT_GROUP in str(error)


def tells_of_lost_peer(text: str) -> bool:
    """Return whether the last line that a process has printed is gloo's, of a peer that has gone."""
    return _OF_GLOO.search(text) is not None


def is_of_two_devices(error: BaseException) -> bool:
    """Return whether torch says that tensors of two devices meet in an operator."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TWO_DEVICES)


def is_of_memory_let_go(error: BaseException) -> bool:
    """Return whether torch says that a tensor's memory was given back before the tensor was used."""
    return isinstance(error, RuntimeError) and _LET_GO in str(error)


def is_of_shards(error: BaseException) -> bool:
    """Return whether torch says that an operator was given shards, which it does not take."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHARDS)


def is_of_inference_mode(error: BaseException) -> bool:
    """Return whether torch says that a tensor made under `torch.inference_mode` is used where it cannot be."""
    return isinstance(error, RuntimeError) and _INFERENCE in str(error)


def is_of_no_gradient(error: BaseException) -> bool:
    """Return whether torch says that a backward pass began at a tensor which no graph leads to."""
    return isinstance(error, RuntimeError) and _NO_GRADIENT in str(error)


def tells_of_no_second_derivative(text: str) -> bool:
    """Return whether the last line of a rank is torch's, of an operator that cannot be differentiated once more."""
    return _SECOND.search(text) is not None


def tells_of_flex_attention(text: str) -> bool:
    """Return whether torch says that flex_attention is not to be had where a program is traced or proven."""
    return any(words in text for words in _FLEX)


def is_of_functional_transforms(error: BaseException) -> bool:
    """Return whether torch says that what a transform of `torch.func` keeps for the backward pass cannot be watched."""
    return isinstance(error, RuntimeError) and all(words in str(error) for words in _FUNCTIONAL)


def is_forbidden(error: BaseException) -> bool:
    """Return whether Google's storage has refused access: gcsfs 2026.10 raises a bare OSError for its answer 403."""
    return type(error) is OSError and str(error).startswith("Forbidden: ")
