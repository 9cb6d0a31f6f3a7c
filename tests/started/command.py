"""Which commands can be forked from a warm process, and what a new interpreter would have made of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from started import EXECUTABLE, PLACES

MODULES = ("paceline", "torch.distributed.run")  # that are run as `python -m MODULE`, with those below them
# What these say is read when a library is imported, so a process that has it otherwise starts anew.
READ_AT_IMPORT = (
    "ATEN_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMPY", "OMP_", "OPENBLAS_", "PYTHON",
    "PYTORCH", "TORCH", "TZ",
)  # fmt: skip
# What Hugging Face's libraries read (HF_, TRANSFORMERS_) is read by the command: the warm process has none of them.
# But for those that are read later, or that `become` heeds. torchrun's are told to its workers.
HEEDED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_NCCL_")
COERCED = ("LC_CTYPE", "C.UTF-8")  # which Python says itself where nothing says it (PEP 538)
HASHES = ("PYTHONHASHSEED", "0")  # which a warm process has, as ranks have; for who asks for none it is as good as any
SHADOWS = ("paceline", "torch", "numpy", "sitecustomize.py", "usercustomize.py")


@dataclass(frozen=True)
class Command:
    """`python [-u] -m MODULE ARGUMENTS`, or `python [-u] SCRIPT ARGUMENTS`."""

    words: tuple[str, ...]
    is_module: bool
    is_unbuffered: bool

    def whole(self) -> list[str]:
        """Return all words of it."""
        unbuffered, module = ["-u"] if self.is_unbuffered else [], ["-m"] if self.is_module else []
        return [EXECUTABLE, *unbuffered, *module, *self.words]


def read(words: Sequence[str]) -> Command | None:
    """Return the command that a process can be forked for, or None where it needs an interpreter of its own."""
    if not words or words[0] != EXECUTABLE:
        return None
    is_unbuffered, rest = words[1:2] == ["-u"], list(words[1:])
    rest = rest[1:] if is_unbuffered else rest
    if rest[:1] == ["-m"] and len(rest) > 1:
        room = rest[1].partition(".")[0]
        return Command(tuple(rest[1:]), True, is_unbuffered) if room in MODULES or rest[1] in MODULES else None
    if rest and rest[0].endswith(".py") and not rest[0].startswith("-"):
        return Command(tuple(rest), False, is_unbuffered)
    return None


def is_alike(environ: Mapping[str, str], warm: Mapping[str, str], folder: str) -> bool:
    """Return whether imports would have come to the same with this environment, in this folder."""
    return _settings(environ) == _settings(warm) and not any(
        (place / name).exists() for place in _places(environ, warm, folder) for name in SHADOWS
    )


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.startswith(READ_AT_IMPORT)}
    known = (COERCED, HASHES)
    return {name: value for name, value in found.items() if not name.startswith(HEEDED) and (name, value) not in known}


def _places(environ: Mapping[str, str], warm: Mapping[str, str], folder: str) -> list[Path]:
    """Return where modules are looked for beyond where the warm process has found its own."""
    known = {*_path(warm), *PLACES, str(Path(__file__).parents[2])}
    return [Path(folder, place) for place in (folder, *_path(environ)) if place not in known]


def _path(environ: Mapping[str, str]) -> list[str]:
    return [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
