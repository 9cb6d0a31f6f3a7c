"""Checkpoints in remote storage that fsspec reaches: copied file by file, the manifest last, and read back.

An object store has no rename, so what has no manifest there is no checkpoint. What is fetched is checked like any other
checkpoint before it is used. Several runs may have one URL: a run removes its own checkpoints alone, and one that has
checkpoints here fetches no other's.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.read_back import PiecesDigest
from paceline.checkpoint.folder import Partial, create_partial, verify_checkpoint
from paceline.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from paceline.checkpoint.tiers.newest import newest_first, next_sequence
from paceline.errors import StorageError
from paceline.patience import Patience
from paceline.scratch import Scratch
from paceline.task.data.storage.extras import missing_storage
from paceline.units import format_seconds

PIECE_BYTES = 2**22
LOOK_SECONDS = 0.05
RUN = "run"  # in a manifest's `extra`: the name of the run that it is of
ATTEMPTS = 1000  # names that are tried for a checkpoint of one step
DESCRIPTORS, MOST_HELD = "/proc/self/fd", 256  # files of a checkpoint that are held open while it is copied


@dataclass(frozen=True)
class Copied:
    """A checkpoint in remote storage, what it is long, and the older ones that went after it."""

    url: str
    bytes: int
    removed: tuple[str, ...] = ()


class Awaited:
    """Whether somebody waits for a fetch. What comes when nobody does any more would be of another past of the run."""

    def __init__(self) -> None:
        self._lock, self.is_over = threading.Lock(), False

    def give_up(self) -> None:
        """Wait no longer: what is not published by now never is."""
        with self._lock:
            self.is_over = True

    def publish(self, partial: Partial, step: int) -> Path:
        """Publish what was fetched. Raises StorageError where nobody waits for it."""
        with self._lock:
            if self.is_over:
                raise StorageError(f"{partial.folder} was fetched too late", "the run has gone on without it")
            return partial.publish(step)


class RemoteStore:
    """The checkpoints below a URL. Every method raises StorageError for whatever the storage answers."""

    def __init__(self, url: str, awaited: Awaited | None = None) -> None:
        """`awaited` is whether somebody waits for what is fetched, where that may end."""
        self.url, self._awaited = url, awaited or Awaited()
        if missing := missing_storage(url, f"a checkpoint in {url}"):
            raise missing
        from fsspec.core import url_to_fs

        with self._told("cannot be reached"):
            found: tuple[Any, str] = url_to_fs(url)
            self._files, root = found
            self._root = root.rstrip("/")

    def copy(self, folder: Path, keep_last: int) -> Copied:
        """Copy a published checkpoint, read the copy back, and remove the run's older ones beyond `keep_last`.

        The run may remove the checkpoint meanwhile, as an old one of its own.
        """
        manifest, words = read_manifest(folder), (folder / MANIFEST_NAME).read_bytes()
        with self._told(f"did not take {folder.name}"), _held(folder, (MANIFEST_NAME, *manifest.files)) as paths:
            target = self._free_name(folder.name, words)
            self._files.makedirs(target, exist_ok=True)
            for name, entry in manifest.files.items():
                self._files.put_file(paths[name], f"{target}/{name}")
                if self._digest(f"{target}/{name}", entry) != (entry.bytes, entry.sha256):
                    raise StorageError(f"{self.url} did not take {folder.name}", f"{name} reads back otherwise")
            self._files.put_file(paths[MANIFEST_NAME], f"{target}/{MANIFEST_NAME}")
            if self._files.cat_file(f"{target}/{MANIFEST_NAME}") != words:
                raise StorageError(f"{self.url} did not take {folder.name}", f"{MANIFEST_NAME} reads back otherwise")
            removed = self._remove_old(keep_last, target, manifest.extra.get(RUN))
        return Copied(self._files.unstrip_protocol(target), manifest.total_bytes, removed)

    def fetch_newest(self, root: Path, newer_than: int, own: Manifest | None = None) -> Path | None:
        """Return a checkpoint copied into the folder `root`, the newest sound one whose sequence number is higher.

        With `own`, of the run alone that this checkpoint is of: that of its name, or whatever has none, if it has
        none. None where there is none. One that arrives damaged is passed over.
        """
        for name, manifest in self._complete():
            if manifest.sequence <= newer_than or self._awaited.is_over:
                return None
            if own is not None and manifest.extra.get(RUN) != own.extra.get(RUN):
                continue
            try:
                return self._fetch(name, manifest, root)
            except StorageError:
                continue
        return None

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first."""
        return [name for name, _ in self._complete()]

    def _fetch(self, name: str, manifest: Manifest, root: Path) -> Path:
        partial = create_partial(root, manifest.step)
        try:
            with self._told(f"did not give {name}"):
                for file in self._lists_first(partial.folder):
                    self._files.get_file(f"{self._root}/{name}/{file}", str(partial.folder / file))
            verify_checkpoint(partial.folder)
            return self._awaited.publish(partial, manifest.step)
        except BaseException:
            partial.discard()
            raise

    def _lists_first(self, folder: Path) -> Iterator[str]:
        """Yield the files of a checkpoint, each once those that name it are in the folder."""
        yield MANIFEST_NAME
        manifest = read_manifest(folder)
        lists = set()
        for name in manifest.lists():
            lists.add(name)
            yield name
        yield from (name for name in manifest.files if name not in lists)

    def _complete(self) -> list[tuple[str, Manifest]]:
        """Return names and manifests, newest first; what has no sound manifest is none."""
        found: list[tuple[str, Manifest]] = []
        with self._told("cannot be listed"), Scratch("remote") as folder:
            paths = self._files.ls(self._root, detail=False) if self._files.exists(self._root) else []
            for path in paths:
                name = path.rstrip("/").rpartition("/")[2]
                if not name.startswith("step-") or not self._files.exists(f"{self._root}/{name}/{MANIFEST_NAME}"):
                    continue
                here = Path(folder, str(len(found)))
                here.mkdir()
                self._files.get_file(f"{self._root}/{name}/{MANIFEST_NAME}", str(here / MANIFEST_NAME))
                try:
                    found.append((name, read_manifest(here)))
                except StorageError:
                    shutil.rmtree(here)
        return sorted(found, key=lambda pair: (pair[1].sequence, pair[1].step), reverse=True)

    def _free_name(self, name: str, words: bytes) -> str:
        """Return where a checkpoint goes: beside one of another run or another past that has its name.

        `words` are its manifest.
        """
        for attempt in range(ATTEMPTS):
            target = f"{self._root}/{name}" + (f".{attempt}" if attempt else "")
            path = f"{target}/{MANIFEST_NAME}"
            if not self._files.exists(path) or self._files.cat_file(path) == words:
                return target
        raise StorageError(f"{self.url} did not take {name}", f"it holds {ATTEMPTS} of that name", "another URL")

    def _remove_old(self, keep_last: int, newest: str, run: object) -> tuple[str, ...]:
        own = [name for name, manifest in self._complete() if manifest.extra.get(RUN) == run]
        doomed = [name for name in own[keep_last:] if f"{self._root}/{name}" != newest]
        for name in doomed:
            self._files.rm_file(f"{self._root}/{name}/{MANIFEST_NAME}")  # it is no checkpoint from here on
            self._files.rm(f"{self._root}/{name}", recursive=True)
        return tuple(doomed)

    def _digest(self, path: str, entry: FileEntry) -> tuple[int, str]:
        """Return length and digest of what the storage gives for a file."""
        digest, length = PiecesDigest(entry), 0
        with self._files.open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                length += len(piece)
        return length, digest.hexdigest()

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as error:  # each storage has errors of its own, with no common type
            because = f"{type(error).__name__}: {error}"
            raise StorageError(f"{self.url} {what}", because, "check the URL and the right to write to it") from error


@contextmanager
def _held(folder: Path, names: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the paths at which files can be read until the block ends, also where somebody removes them meanwhile.

    They are those of open descriptors, of `MOST_HELD` files at most and where the system has such paths (Linux). Raises
    OSError where one is gone already.
    """
    with ExitStack() as opened:
        paths = {name: str(folder / name) for name in names}
        for name in list(paths)[:MOST_HELD] if Path(DESCRIPTORS).is_dir() else ():
            file = opened.enter_context((folder / name).open("rb"))
            paths[name] = f"{DESCRIPTORS}/{file.fileno()}"
        yield paths


def fetch_newer(url: str, roots: list[Path], into: Path, hanging_after: float) -> list[str]:
    """Fetch the newest checkpoint of a URL where it is newer than all in the roots; return what happened, in words.

    Storage that cannot be reached, or gives nothing for `hanging_after` seconds, is told and costs nothing where there
    are checkpoints here. Raises StorageError where there are none: a run that had progress must not begin anew because
    a network is down.
    """
    if not url:
        return []
    newest = next_sequence(roots, lengths=True) - 1
    here = newest_first(roots).complete
    own, awaited = here[0].manifest if here else None, Awaited()

    def fetched() -> Path | None:
        return RemoteStore(url, awaited).fetch_newest(into, newest, own)

    try:
        path = _within(hanging_after, f"{url} has not answered", fetched, awaited.give_up)
    except StorageError as error:
        if not newest:
            raise
        return [f"{error.what}: {error.because}"]
    return [] if path is None else [f"fetched {path.name} from {url}, which is newer than all that is here"]


def _within(
    seconds: float, what: str, work: Callable[[], Path | None], give_up: Callable[[], None]
) -> Path | None:  # fmt: skip
    """Return what some work gives that may hang. Raises what it raises, and StorageError where it has not ended.

    Its thread ends with the process then, wherever it hangs; `give_up` is called before that is said.
    """
    found: list[Path | None] = []
    errors: list[BaseException] = []

    def worked() -> None:
        try:
            found.append(work())
        except BaseException as error:  # whoever waits gets it
            errors.append(error)

    thread, patience = threading.Thread(target=worked, name="paceline-fetch", daemon=True), Patience(seconds)
    thread.start()
    while thread.is_alive() and not patience.is_over:
        thread.join(LOOK_SECONDS)
    give_up()
    if errors:
        raise errors[0]
    if not found:
        raise StorageError(
            what, f"after {format_seconds(seconds)}", "look after the storage, or run.checkpoints.remote"
        )
    return found[0]
