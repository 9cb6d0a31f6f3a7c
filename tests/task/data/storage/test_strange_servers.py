"""Web servers as there are: without ranges, without sizes, with a page of links for a folder, silent, or lying."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import os
import socket
import struct
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import is_text, open_sources
from paceline.task.data.sources.cache import open_corpus
from paceline.task.data.sources.documents import read_documents
from paceline.task.data.sources.files import list_files
from paceline.task.data.storage import remote
from paceline.task.data.storage.notices import DataNotices
from paceline.task.data.storage.remote import RemoteFiles, open_stream
from paceline.task.data.storage.retries import Retries

pytest.importorskip("aiohttp")
CONTENT = bytes(range(256)) * 400
QUICK = Retries(attempts=3, wait=lambda seconds: None)


class Plain(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` is: a page of links for a folder, and no ranges."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class Odd(http.server.BaseHTTPRequestHandler):
    """Gives CONTENT, in the way that its path says; `silences` counts how often it will say nothing more."""

    silences = 0
    ended = threading.Event()

    def do_HEAD(self) -> None:
        self.send_response(200)
        if "unsized" not in self.path:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()

    def do_GET(self) -> None:
        start, stop = self._asked()
        body = CONTENT[start:stop]
        if "longer" in self.path and stop - start < len(CONTENT):
            body = CONTENT[start : stop + 4096]
        if "shorter" in self.path:
            body = body[: len(body) // 2]
        self.send_response(206 if "Range" in self.headers else 200)
        if "unsized" not in self.path:
            told = len(body) + (99 if "promising" in self.path else 0)
            self.send_header("Content-Length", str(told))
        self.end_headers()
        if "silent" in self.path and type(self).silences:
            type(self).silences -= 1
            self.wfile.write(body[:7])
            self.wfile.flush()
            type(self).ended.wait(30)
            return
        self.wfile.write(body)

    def _asked(self) -> tuple[int, int]:
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), int(last) + 1 if last else len(CONTENT)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: object) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # type: ignore[arg-type]
        server.daemon_threads = True  # of which one may be silent
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        Odd.ended.set()
        server.shutdown()


def write_lines(folder: Path, name: str, texts: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_a_folder_behind_a_page_of_links_is_the_local_one_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    """Such a page says neither sizes nor times: a file that had changed was taken for the one that was tokenised."""
    root = tmp_path / "served" / "my data"
    write_lines(root, "a b.jsonl", ["one", "two"])
    write_lines(root / "deeper", "c\u00e9.jsonl", ["three"])
    (root / ".hidden.jsonl").write_text("no")
    (root / "empty.jsonl").write_text("")
    with serving(functools.partial(Plain, directory=str(tmp_path / "served"))) as url:
        here = DataSpec(str(root), tokenizer="bytes", cache_dir=str(tmp_path / "cache"), validation_fraction=0.0)
        there = DataSpec(f"{url}/my%20data", tokenizer="bytes", cache_dir=str(tmp_path / "other"),
                         validation_fraction=0.0)  # fmt: skip
        listing = list_files(there)
        assert sorted(file.size for file in listing.files) == sorted(file.size for file in list_files(here).files)
        assert sorted(each.text for each in read_documents(there, listing)) == [b"one", b"three", b"two"]
        assert open_corpus(there).train.tokens == open_corpus(here).train.tokens
        write_lines(root, "a b.jsonl", ["one", "2 !"])  # as long as before
        os.utime(root / "a b.jsonl", (1, 1))
        corpus = open_corpus(there)
        assert b"2 !" in bytes(corpus.train.open().astype("u1")) and b"two" not in bytes(
            corpus.train.open().astype("u1")
        )


def test_shards_are_read_from_a_server_without_ranges(tmp_path: Path) -> None:
    write_lines(tmp_path / "text", "a.jsonl", [f"document {n} " * (n + 1) for n in range(40)])
    served = tmp_path / "served"
    prepare(DataSpec(str(tmp_path / "text"), tokenizer="bytes", validation_fraction=0.0), served / "shards")
    with serving(functools.partial(Plain, directory=str(served))) as url:
        found = []
        for source in (str(served / "shards"), f"{url}/shards"):
            data = DataSpec(source, seq_len=32, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))
            train = open_sources(data, 3)[0]
            found.append(train.read(np.arange(train.samples))["tokens"])
        assert found[0].equal(found[1])


@pytest.mark.parametrize("path", ["plain", "whole"])
def test_parts_are_what_they_are_of_an_honest_server(tmp_path: Path, path: str) -> None:
    (tmp_path / "whole").write_bytes(CONTENT)
    handler = Odd if path == "plain" else functools.partial(Plain, directory=str(tmp_path))
    with serving(handler) as url:
        files = RemoteFiles(f"{url}/{path}", None, QUICK)
        for known in (False, True):
            for start, stop in ((0, 10), (0, len(CONTENT)), (300, 500), (len(CONTENT) - 5, len(CONTENT))):
                assert files.read(files.url, start, stop) == CONTENT[start:stop]
            assert files.file().size == len(CONTENT) or known
        with open_stream(files.url) as stream:
            assert stream.read() == CONTENT


def test_a_file_whose_size_nobody_says_is_an_error_and_not_empty() -> None:
    with serving(Odd) as url:
        with pytest.raises(DataError, match="does not say how large it is"):
            open_stream(f"{url}/unsized.jsonl")
        with pytest.raises(DataError, match="does not say how large it is"):
            list_files(DataSpec(f"{url}/unsized.jsonl"))


@pytest.mark.parametrize(("kind", "told"), [("shorter", "instead of"), ("longer", "instead of"), ("promising", "")])
def test_what_is_not_what_was_asked_for_is_never_taken_for_it(kind: str, told: str) -> None:
    """Of a part that is longer than was asked for, nobody knows where it begins."""
    with serving(Odd) as url:
        files = RemoteFiles(f"{url}/{kind}", DataNotices(), QUICK)
        assert files.file().size == len(CONTENT)
        with pytest.raises(DataError, match=f"cannot be read(.|\n)*{told}(.|\n)*after 3 attempts"):
            files.read(files.url, 10, 20)


def test_a_server_that_falls_silent_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(Odd, "silences", 2)
    Odd.ended.clear()
    with serving(Odd) as url:
        notices = DataNotices()
        files = RemoteFiles(f"{url}/silent", notices, QUICK)
        assert files.read(files.url, 100, 5000) == CONTENT[100:5000]
        assert notices.total(f"{url}/silent was read again") == 2


class Busy(Plain):
    """Answers each path that it is no time now, as often as `busy` says, or ends the connection; then as it should."""

    asked: ClassVar[Counter[str]] = Counter()
    busy, ends_connections = 3, False

    def do_HEAD(self) -> None:
        if self._has_time():
            super().do_HEAD()

    def do_GET(self) -> None:
        if self._has_time():
            super().do_GET()

    def _has_time(self) -> bool:
        type(self).asked[self.path] += 1
        if type(self).asked[self.path] > type(self).busy:
            return True
        if type(self).ends_connections:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
            self.close_connection = True
            self.connection.close()
        else:
            self.send_error(503)
        return False

    def finish(self) -> None:
        with suppress(OSError, ValueError):  # of a connection that was ended
            super().finish()


@pytest.mark.parametrize("ends_connections", [False, True])
def test_a_server_that_is_busy_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_connections: bool
) -> None:
    """fsspec takes what is wrong while it looks for a file as "not there", and leaves out folders it cannot list."""
    monkeypatch.setattr(Busy, "ends_connections", ends_connections)
    for name in ("a.jsonl", "deeper/b.jsonl", "deeper/still/c.jsonl"):
        write_lines((tmp_path / name).parent, (tmp_path / name).name, [name])
    patient = Retries(attempts=8, wait=lambda seconds: None)
    with serving(functools.partial(Busy, directory=str(tmp_path))) as url:
        for ask, wanted in (
            (lambda files: files.exists(f"{url}/a.jsonl"), True),
            (lambda files: files.exists(f"{url}/b.jsonl"), False),
            (lambda files: files.file(f"{url}/a.jsonl").size, (tmp_path / "a.jsonl").stat().st_size),
            (lambda files: [each.name for each in files.below()],
             ["a.jsonl", "deeper/b.jsonl", "deeper/still/c.jsonl"]),
        ):  # fmt: skip
            monkeypatch.setattr(Busy, "asked", Counter())
            assert ask(RemoteFiles(url, None, patient)) == wanted
        monkeypatch.setattr(Busy, "busy", 10**9)
        with pytest.raises(DataError, match=r"cannot be read(.|\n)*after 3 attempts(.|\n)*whether the storage answers"):
            RemoteFiles(url, None, QUICK).file(f"{url}/a.jsonl")


def test_a_server_that_refuses_says_so() -> None:
    class Refuses(Plain):
        def do_HEAD(self) -> None:
            self.send_error(403)

        do_GET = do_HEAD

    with serving(Refuses) as url:
        files = RemoteFiles(f"{url}/a.jsonl", None, QUICK)
        assert not files.exists(files.url), "as a storage answers that shows nobody what is not there"
        with pytest.raises(DataError, match=r"403(.|\n)*credentials"):
            files.file()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.csv", "a.tar"])
def test_a_link_that_is_signed_is_of_the_kind_that_its_path_says(tmp_path: Path, name: str) -> None:
    """Lines of JSON behind such a link were taken for one text, in silence."""
    served, lines = tmp_path / "served", [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(40)]
    served.mkdir()
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(lines), served / name)
    elif name == "a.csv":
        (served / name).write_text("text,label\n" + "".join(f"{line['text']},{line['label']}\n" for line in lines))
    elif name == "a.tar":
        write_tar(served / name)
    else:
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (served / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with serving(functools.partial(Plain, directory=str(served))) as url:
        found = []
        for source in (str(served / name), f"{url}/{name}?X-Signature=a/b.bin&expires=9#top"):
            data = DataSpec(
                source, seq_len=16, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"), image_size=8
            )
            train, held_out = open_sources(data, 3)
            found.append((train.samples, train.read(np.arange(4))))
            assert held_out is None
            assert not is_text(source) or "?" not in list_files(data).name
        assert found[0][0] == found[1][0]
        assert found[0][1].keys() == found[1][1].keys()
        assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(6):
            content = io.BytesIO()
            Image.fromarray(np.full((9, 9, 3), number * 20, dtype=np.uint8)).save(content, "PNG")
            entry = tarfile.TarInfo(f"{'ab'[number % 2]}/{number}.png")
            entry.size = len(content.getvalue())
            tar.addfile(entry, io.BytesIO(content.getvalue()))
