"""Files behind URLs (s3://, gs://, http://, memory:// and others), through fsspec: listed, and read in byte ranges."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import MissingExtra
from paceline.task.data.storage.notices import DataNotices
from paceline.task.data.storage.retries import Retries

STREAM_BYTES = 8 * 2**20  # what one request of a stream asks for
# What storages call that which changes with a file's content. Those that say nothing are told apart by size alone.
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "VersionId", "LastModified", "last_modified", "mtime", "updated",
            "created")  # fmt: skip


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.replace("+", "").replace("-", "").isalnum()


@dataclass(frozen=True)
class RemoteFile:
    """One file: its URL, its name below the folder that was listed, its size, and what changes with its content."""

    url: str
    name: str
    size: int
    version: str


class RemoteFiles:
    """The files that a URL reaches. Every method raises DataError for what the storage answers."""

    def __init__(self, url: str, notices: DataNotices | None = None, retries: Retries | None = None) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtra("fsspec", "remote", f"reading {url}") from error
        self.url, self.notices, self.retries = url, notices, retries or Retries()
        found: tuple[Any, str] = self.retries.run(url, lambda: url_to_fs(url), notices)
        self._files, self._root = found

    def file(self, url: str = "", is_new: bool = False) -> RemoteFile:
        """Return a file's size and version, of `url` or of the URL itself; asked for anew, or from a known listing."""
        url = url or self.url

        def once() -> dict[str, Any]:
            if is_new:
                self._files.invalidate_cache(self._path(url))
            return dict(self._files.info(self._path(url)))

        return self._file(url, url.rstrip("/").rpartition("/")[2], self.retries.run(url, once, self.notices))

    def exists(self, url: str) -> bool:
        """Return whether there is a file of this URL."""
        return bool(self.retries.run(url, lambda: self._files.exists(self._path(url)), self.notices))

    def is_folder(self) -> bool:
        """Return whether the URL is a folder."""
        return bool(self.retries.run(self.url, lambda: self._files.isdir(self._root), self.notices))

    def below(self) -> list[RemoteFile]:
        """Return every file below the URL in the order of names, but hidden ones."""
        found: dict[str, Any] = self.retries.run(
            self.url, lambda: self._files.find(self._root, detail=True), self.notices
        )
        root = self._root.rstrip("/")
        files = []
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            if info.get("type") == "file" and not any(part.startswith(".") for part in name.split("/")):
                files.append(self._file(f"{self.url.rstrip('/')}/{name}", name, info))
        return sorted(files, key=lambda file: file.name)

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes start..stop of a file; an answer of another length is asked for again."""

        def once() -> bytes:
            content: bytes = self._files.cat_file(self._path(url), start=start, end=stop)
            if len(content) >= stop > stop - start:  # a server that knows no ranges gives the whole file
                content = content[start:stop]
            if len(content) != stop - start:
                raise ConnectionError(f"{len(content):,} bytes came instead of {stop - start:,}")
            return content

        return self.retries.run(url, once, self.notices) if stop > start else b""

    def read_all(self, url: str) -> bytes:
        """Return a whole file, a small one."""
        return bytes(self.retries.run(url, lambda: self._files.cat_file(self._path(url)), self.notices))

    def write(self, url: str, path: Path) -> None:
        """Copy a local file to a URL."""

        def once() -> None:
            target = self._path(url)
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), target)

        self.retries.run(url, once, self.notices)

    def _path(self, url: str) -> str:
        return str(self._files._strip_protocol(url))

    def _file(self, url: str, name: str, info: dict[str, Any]) -> RemoteFile:
        size = int(info.get("size") or 0)
        version = " ".join(f"{key}={info[key]}" for key in VERSIONS if info.get(key))
        return RemoteFile(url, name, size, hashlib.blake2b(f"{size} {version}".encode(), digest_size=8).hexdigest())


class RemoteStream(io.RawIOBase):
    """A remote file read from its beginning to its end, or at places, by requests that are tried again."""

    def __init__(self, files: RemoteFiles, url: str, size: int) -> None:
        self._files, self._url, self._size, self._at = files, url, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def readall(self) -> bytes:
        """Return what is left of the file."""
        parts = []
        while self._at < self._size:
            stop = min(self._size, self._at + STREAM_BYTES)
            parts.append(self._files.read(self._url, self._at, stop))
            self._at = stop
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the file goes and return how far."""
        wanted = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(wanted))
        content = self._files.read(self._url, self._at, stop)
        wanted[: len(content)] = content
        self._at += len(content)
        return len(content)


def open_stream(url: str, notices: DataNotices | None = None) -> io.BufferedReader:
    """Return a remote file opened for reading. Raises DataError."""
    files = RemoteFiles(url, notices)
    return io.BufferedReader(RemoteStream(files, url, files.file().size), STREAM_BYTES)
