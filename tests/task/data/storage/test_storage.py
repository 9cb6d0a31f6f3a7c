"""Remote files: read in ranges and tried again; the block cache bounded, sound and shared by processes."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from paceline.errors import DataError, StorageError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.storage.blocks import HASH_BYTES, BlockCache
from paceline.task.data.storage.bytes import CachedBytes
from paceline.task.data.storage.notices import DataNotices
from paceline.task.data.storage.remote import RemoteFiles, open_stream
from paceline.task.data.storage.retries import Retries

WAITS: list[float] = []
QUICK = Retries(attempts=4, wait=WAITS.append)


class Server(http.server.BaseHTTPRequestHandler):
    """Serves a folder by ranges of bytes; `faults` answers come first, each once."""

    folder: Path
    faults: list[int]
    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        path = self.folder / self.path.lstrip("/")
        if body and self.faults and not path.is_dir():
            self.send_error(self.faults.pop(0))
            return
        if not path.is_file():
            self.send_error(404)
            return
        content, span = path.read_bytes(), self.headers.get("Range")
        self.requests.append(f"{path.name} {span}")
        start, stop = 0, len(content)
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1) if last else stop
        self.send_response(206 if span else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[start:stop])

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, type[Server]]]:
    handler = type("HandlerOfATest", (Server,), {"folder": tmp_path / "served", "faults": [], "requests": []})
    (tmp_path / "served").mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()


def text_spec(folder: Path, **options: object) -> DataSpec:
    folder.mkdir(exist_ok=True)
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"document {number} says {number * number}. " * (20 + number))
    return DataSpec(str(folder), seq_len=32, validation_fraction=0.2, **options)  # type: ignore[arg-type]


def test_what_may_pass_is_tried_again_and_told(served: tuple[str, type[Server]]) -> None:
    url, server = served
    (server.folder / "a.bin").write_bytes(bytes(range(256)) * 40)
    notices = DataNotices()
    files = RemoteFiles(f"{url}/a.bin", notices, QUICK)
    server.faults += [503, 429, 500]
    WAITS.clear()
    assert files.read(f"{url}/a.bin", 300, 310) == bytes(range(44, 54))
    assert len(WAITS) == 3 and WAITS[0] < WAITS[2] <= QUICK.first_seconds * 4
    assert notices.total(f"{url}/a.bin was read again") == 3 and sum(one.times for one in notices.take()) == 3
    server.faults += [503] * 9
    with pytest.raises(DataError, match=r"cannot be read\n.*503.*after 4 attempts"):
        files.read(f"{url}/a.bin", 0, 5)
    server.faults.clear()
    WAITS.clear()
    server.faults += [403]
    with pytest.raises(DataError, match=r"cannot be read\n.*403"):
        files.read(f"{url}/a.bin", 0, 5)
    with pytest.raises(DataError, match=r"cannot be read\n.*FileNotFound"):
        files.read(f"{url}/none", 0, 5)
    lacking = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")  # as S3's client calls it

    def locked() -> None:
        raise lacking

    with pytest.raises(DataError, match="check the credentials"):
        QUICK.run("s3://bucket/a", locked)
    refused = type("HttpError", (Exception,), {"code": 401})("Unauthorized, 401")  # as gcsfs calls it
    for error in (refused, OSError("Forbidden: b/bucket/o/a\nno access")):  # and what it says of 403

        def shut(error: Exception = error) -> None:
            raise error

        with pytest.raises(DataError, match="check the credentials"):
            QUICK.run("gs://bucket/a", shut)
    assert not WAITS, "what does not pass is not tried again"


def test_a_stream_is_the_file(served: tuple[str, type[Server]]) -> None:
    url, server = served
    content = np.random.default_rng(1).bytes(9_000_000)
    (server.folder / "a.bin").write_bytes(content)
    with open_stream(f"{url}/a.bin") as stream:
        assert stream.read() == content and stream.seek(-7, 2) == len(content) - 7 and stream.read() == content[-7:]


def test_pieces_are_fetched_once_and_kept(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    content = np.random.default_rng(2).bytes(100_000)
    memory.pipe("/blocks/a.bin", content)
    files = RemoteFiles("memory://blocks/a.bin", None, QUICK)
    asked: list[tuple[int, int]] = []
    read = files.read
    files.read = lambda url, start, stop: asked.append((start, stop)) or read(url, start, stop)  # type: ignore
    cache = BlockCache(tmp_path, 10**6)
    remote = CachedBytes(files, files.file(), cache, piece_bytes=4096)
    generator = np.random.default_rng(3)
    for _ in range(200):
        start, stop = sorted(generator.integers(0, len(content) + 1, 2).tolist())
        assert remote.read(start, stop).tobytes() == content[start:stop]
    taken = np.zeros(len(content), dtype=int)
    for start, stop in asked:
        taken[start:stop] += 1
    assert taken.max() == 1 and len(asked) <= 25, "each byte once"
    asked.clear()
    again = CachedBytes(files, files.file(), BlockCache(tmp_path, 10**6), piece_bytes=4096)
    assert again.read(0, len(content)).tobytes() == content and not asked, "another process finds them"
    block = next(tmp_path.glob("*/*.block"))
    block.write_bytes(b"x" + block.read_bytes()[1:])
    third = CachedBytes(files, files.file(), BlockCache(tmp_path, 10**6), piece_bytes=4096)
    assert third.read(0, len(content)).tobytes() == content and len(asked) == 1, "a damaged piece is fetched again"
    ahead = CachedBytes(files, files.file(), BlockCache(tmp_path / "other", 10**6), piece_bytes=4096)
    asked.clear()
    ahead.expect(np.array([[0, 50_000]]))
    assert ahead.read(0, 50_000).tobytes() == content[:50_000]
    assert asked == [(0, 13 * 4096)], "neighbours come by one request"
    with pytest.raises(DataError, match="cut short"):
        remote.read(0, len(content) + 1)


def test_the_cache_stays_below_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache, size = BlockCache(tmp_path, 10_000), 1000 - HASH_BYTES
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "left.part").write_bytes(b"of a process that died")
    for number in range(40):
        cache.get(f"{number:02x}{number}", lambda: bytes(size))
        for path in tmp_path.glob("*/*.block"):  # times of one tick cannot be told apart
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
        BlockCache(tmp_path, 10_000).get("000", lambda: pytest.fail("what is used again stays"))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*.block")) <= 10_000
    assert len(list(tmp_path.glob("*/*.block"))) >= 8 and not list(tmp_path.glob("*/*.part"))
    big = cache.get("ffbig", lambda: bytes(20_000))
    assert len(big) == 20_000 and not cache._path("ffbig").exists(), "what has no room is read all the same"


PROCESS = """
import sys
from pathlib import Path
from paceline.task.data.storage.blocks import BlockCache
cache, log = BlockCache(Path(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3])
def fetch(number):
    with log.open("a") as stream:
        stream.write(f"{number}\\n")
    return bytes([number]) * 5000
for turn in range(3):
    for number in range(20):
        found = cache.get(f"{number:02x}", lambda: fetch(number))
        assert found.tobytes() == bytes([number]) * 5000
    cache._mapped.clear()
"""


@pytest.mark.parametrize("limit", [10**6, 30_000])
def test_processes_share_a_cache(tmp_path: Path, limit: int) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", PROCESS, str(tmp_path / "cache"), str(limit), str(log)]
    running = [subprocess.Popen(words) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    fetched = log.read_text().split()
    if limit == 10**6:
        assert sorted(map(int, fetched)) == list(range(20)), "each piece is fetched once by all of them together"
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*.block")) <= limit


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        BlockCache(tmp_path / "file", 1000).get("ab", lambda: b"x")


def test_remote_shards_give_the_batches_of_local_ones(tmp_path: Path, served: tuple[str, type[Server]]) -> None:
    url, server = served
    spec = text_spec(tmp_path / "text")
    prepare(spec, server.folder / "shards", part_bytes=4000)
    local, _ = open_sources(DataSpec(str(server.folder / "shards"), seq_len=32), 7)
    far = DataSpec(f"{url}/shards", seq_len=32, cache_dir=str(tmp_path / "cache"))
    remote, held_out = open_sources(far, 7)
    assert remote.fingerprint == local.fingerprint and held_out is not None
    assert (local.steps_ahead, remote.steps_ahead > 0) == (0, True)
    ids = np.random.default_rng(1).permutation(local.samples)
    remote.expect(ids)
    assert torch.equal(remote.read(ids)["labels"], local.read(ids)["labels"])
    spans = [line for line in server.requests if ".shard bytes" in line]
    assert len(spans) == len(set(spans)), "each byte once"
    before = len(server.requests)
    again, _ = open_sources(far, 7)
    assert torch.equal(again.read(ids)["tokens"], local.read(ids)["tokens"])
    assert not [line for line in server.requests[before:] if ".shard bytes" in line], "all of it is cached"


def test_remote_documents_are_the_local_ones(tmp_path: Path, served: tuple[str, type[Server]]) -> None:
    spec = text_spec(tmp_path / "text", cache_dir=str(tmp_path / "cache"))
    lines = "\n".join(json.dumps({"text": path.read_text()}) for path in sorted((tmp_path / "text").glob("*.txt")))
    (served[1].folder / "all.jsonl").write_text(lines)
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "text").glob("*.txt"):
        memory.pipe(f"/documents/{path.name}", path.read_bytes())
    memory.pipe("/documents/.hidden.txt", b"no")
    wanted, _ = open_sources(spec, 7)
    for source in ("memory://documents", f"{served[0]}/all.jsonl"):
        found, _ = open_sources(DataSpec(source, seq_len=32, validation_fraction=0.2, cache_dir=spec.cache_dir), 7)
        assert found.fingerprint == wanted.fingerprint
    with pytest.raises(DataError, match="cannot be read"):
        open_sources(DataSpec(f"{served[0]}/none.jsonl", seq_len=32, cache_dir=spec.cache_dir), 7)


def test_remote_text_is_prepared_as_local_text_is(tmp_path: Path, served: tuple[str, type[Server]]) -> None:
    text_spec(tmp_path / "text")
    lines = [json.dumps({"text": path.read_text()}) for path in sorted((tmp_path / "text").glob("*.txt"))]
    (served[1].folder / "all.jsonl").write_text("\n".join(lines))
    far = DataSpec(f"{served[0]}/all.jsonl", validation_fraction=0.2)
    near = DataSpec(str(served[1].folder / "all.jsonl"), validation_fraction=0.2)
    served[1].faults += [503]
    done = [prepare(spec, tmp_path / name, workers=2, part_bytes=9000) for name, spec in (("far", far), ("near", near))]
    assert done[0].index.fingerprint == done[1].index.fingerprint and len(done[0].index.splits["train"]) > 2


def test_a_piece_that_is_not_what_the_shard_says_is_fetched_again(tmp_path: Path) -> None:
    spec = text_spec(tmp_path / "text")
    prepare(spec, tmp_path / "shards")
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "shards").iterdir():
        memory.pipe(f"/again/{path.name}", path.read_bytes())
    far = DataSpec("memory://again", seq_len=32, cache_dir=str(tmp_path / "cache"))
    good = open_sources(far, 7)[0].read(np.arange(20))["tokens"]
    for block in (tmp_path / "cache" / "blocks").glob("*/*.block"):  # a sound piece of wrong bytes
        content = bytearray(block.read_bytes()[:-HASH_BYTES])
        if len(content) <= 200:
            continue  # a header, which is a piece of its own
        content[200] ^= 255
        import hashlib

        block.write_bytes(bytes(content) + hashlib.blake2b(content, digest_size=HASH_BYTES).digest())
    again = open_sources(far, 7)[0]
    assert torch.equal(again.read(np.arange(20))["tokens"], good)
