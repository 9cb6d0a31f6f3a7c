"""Files behind URLs (s3://, gs://, http://, memory:// and others), through fsspec: listed, and read in byte ranges."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.task.data.daemons import DaemonThreads
from paceline.task.data.storage.extras import missing_storage
from paceline.task.data.storage.notices import DataNotices
from paceline.task.data.storage.retries import Retries, may_pass

AT_ONCE = 8  # files of a page of links that are asked for side by side
OF_A_PAGE = frozenset("?#")  # in the links by which a page is sorted
CONNECT_SECONDS, SILENT_SECONDS = 30.0, 60.0  # of a web server, until a read is tried again
STREAM_BYTES = 8 * 2**20  # what one request of a stream asks for
# What storages call that which changes with a file's content. Those that say nothing are told apart by size alone.
VERSIONS = ("ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "md5Hash", "generation", "VersionId",
            "LastModified", "last_modified", "mtime", "updated", "created")  # fmt: skip


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    scheme, found, _ = path.partition("://")
    return bool(found) and scheme.replace("+", "").replace("-", "").isalnum()


def name_of(url: str) -> str:
    """Return the last part of a URL's path: what a file is called. What a web server is asked with, such as the
    signature of a link that was made for a while, is no part of it."""
    if _is_web(url):
        url = url.partition("#")[0].partition("?")[0]
    return url.rstrip("/").rpartition("/")[2]


def _is_web(url: str) -> bool:
    return url.partition("://")[0] in ("http", "https")


def _walks(files: Any) -> bool:
    """Return whether a storage is listed folder by folder, by fsspec itself."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    own = type(files)
    if issubclass(own, AsyncFileSystem):
        return bool(own._find is AsyncFileSystem._find)
    return bool(own.find is AbstractFileSystem.find)


def _options(url: str) -> dict[str, Any]:
    """Return what a storage is opened with: of a web server silence is an error, and a slow answer is none."""
    if not _is_web(url):
        return {}
    try:
        from aiohttp import ClientTimeout
    except ImportError:  # which fsspec tells
        return {}
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
    return {"client_kwargs": {"timeout": timeout}}


@dataclass(frozen=True)
class RemoteFile:
    """One file: URL, name below the listed folder, size, and a version that changes with the content."""

    url: str
    name: str
    size: int
    version: str


class RemoteFiles:
    """The files that a URL reaches. Every method raises DataError for what the storage answers."""

    def __init__(self, url: str, notices: DataNotices | None = None, retries: Retries | None = None) -> None:
        if missing := missing_storage(url, f"reading {url}"):
            raise missing
        from fsspec.core import url_to_fs

        self.url, self.notices, self.retries = url, notices, retries or Retries()
        found: tuple[Any, str] = self.retries.run(url, lambda: url_to_fs(url, **_options(url)), notices)
        self._files, self._root = found
        self._sizes: dict[str, int] = {}  # of files that were asked for

    def file(self, url: str = "", is_new: bool = False, name: str = "") -> RemoteFile:
        """Return a file's size and version, of `url` or of the URL itself; asked for anew, or from a known listing.

        Raises DataError where the storage does not say how large it is.
        """
        url = url or self.url

        def once() -> dict[str, Any]:
            if is_new:
                self._files.invalidate_cache(self._path(url))
            return dict(self._files.info(self._path(url)))

        return self._file(url, name or name_of(url), self.retries.run(url, once, self.notices))

    def exists(self, url: str) -> bool:
        """Return whether there is a file of this URL."""

        def once() -> bool:
            if not _is_web(url):
                return bool(self._files.exists(self._path(url)))
            try:  # fsspec's own answer is no wherever a server is busy
                self._files.info(self._path(url))
            except FileNotFoundError as error:
                if may_pass(error):
                    raise
                return False
            return True

        return self.retries.run(url, once, self.notices)

    def is_folder(self) -> bool:
        """Return whether the URL is a folder."""
        return bool(self.retries.run(self.url, lambda: self._files.isdir(self._root), self.notices))

    def below(self) -> list[RemoteFile]:
        """Return every file below the URL in the order of names, but hidden ones.

        A page of links, which is how a web server lists a folder, says of no file how large it is or when it was
        changed: each is asked for by itself.
        """
        found = self._walked() if _walks(self._files) else self._found()
        root = self._root.rstrip("/")
        listed, asked = list[RemoteFile](), list[str]()
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            if info.get("type") != "file" or any(part.startswith(".") for part in name.split("/")):
                continue
            if info.get("size") is not None:
                listed.append(self._file(f"{self.url.rstrip('/')}/{name}", name, info))
            elif not OF_A_PAGE.intersection(name):
                asked.append(name)
        threads = DaemonThreads(AT_ONCE, "paceline-list")  # which nobody waits for after Ctrl-C
        try:
            base = self.url.rstrip("/")
            coming = [threads.submit(self.file, f"{base}/{name}", False, name) for name in asked]
            listed += [file.result() for file in coming]
        finally:
            threads.drop()
            threads.close(0.0)
        return sorted(listed, key=lambda file: file.name)

    def _found(self) -> dict[str, Any]:
        """Return what the storage says of all files below the URL, by their paths, in one answer."""
        found: dict[str, Any] = self.retries.run(
            self.url, lambda: self._files.find(self._root, detail=True), self.notices
        )
        return found

    def _walked(self) -> dict[str, Any]:
        """Return the same of a storage that is listed folder by folder, each of which is asked for again by itself.

        fsspec would leave out folders that it cannot list. A link to a folder that is not there is left out here too.
        """
        found, folders, known = dict[str, Any](), [self._root], {self._root.rstrip("/")}
        for folder in folders:  # which grow meanwhile
            try:
                listed = self.retries.run(folder, partial(self._files.ls, folder, detail=True), self.notices)
            except DataError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    continue
                raise
            for info in listed:
                path = info["name"].rstrip("/")
                if info["type"] != "directory":
                    found[info["name"]] = info
                elif path not in known:
                    known.add(path)
                    folders.append(path)
        return found

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes start..stop of a file; an answer of another length is asked for again."""

        def once() -> bytes:
            content: bytes = self._files.cat_file(self._path(url), start=start, end=stop)
            whole = self._sizes.get(url, len(content))
            if stop - start < len(content) == whole and stop <= whole:  # a server without ranges gives the whole file
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
        if info.get("size") is None:  # taken for an empty file, it would be left out without a word
            raise DataError(
                f"{url} cannot be read", "the storage does not say how large it is, so no part of it can be asked for",
                "download it, and name the local file",
            )  # fmt: skip
        size = self._sizes[url] = int(info["size"])
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
