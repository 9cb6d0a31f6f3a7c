"""Files opened for reading, local or remote, and unpacked on the way: .gz, .bz2, .xz and .zst."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from paceline.errors import DamagedData, DataError, MissingExtra
from paceline.task.data.sources.listing import File, packed_suffix
from paceline.task.data.storage.remote import is_remote, open_stream


@contextmanager
def opened(file: File) -> Iterator[IO[bytes]]:
    """Open a file for reading, unpacking what its name says is packed.

    Raises DamagedData for one that cannot be unpacked, DataError for what fails while it is read, and MissingExtra for
    `.zst` without pyarrow.
    """
    packed = packed_suffix(file.name)
    try:
        with _raw(file) as raw:
            if not packed:
                yield raw
            else:
                with _UNPACKED[packed](raw, file.name) as unpacked:
                    yield cast(IO[bytes], unpacked)
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _damaged(file, error) from error
    except OSError as error:
        if packed and error.errno is None:  # of the unpacking; an error of the system has a number
            raise _damaged(file, error) from error
        raise DataError(
            f"{file.path} cannot be read", error.strerror or str(error), "check that it is there and its permissions"
        ) from error


def _raw(file: File) -> IO[bytes]:
    if is_remote(file.path):
        return cast(IO[bytes], open_stream(file.path))
    return open(file.path, "rb")  # noqa: PTH123 (a path as listed; Path would only be made for this)


def _damaged(file: File, error: Exception) -> DamagedData:
    told = str(error).splitlines() or [type(error).__name__]
    return DamagedData(f"{file.path} cannot be unpacked", told[0], "write or download it again")


def _zstd(raw: IO[bytes], name: str) -> object:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", f"unpacking {name}") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))  # a stream of Arrow's has no lines


_UNPACKED: dict[str, Callable[[IO[bytes], str], Any]] = {
    ".gz": lambda raw, name: gzip.open(raw),  # noqa: SIM115 (whoever calls it closes it)
    ".bz2": lambda raw, name: bz2.open(raw),  # noqa: SIM115
    ".xz": lambda raw, name: lzma.open(raw),  # noqa: SIM115
    ".zst": _zstd,
}
