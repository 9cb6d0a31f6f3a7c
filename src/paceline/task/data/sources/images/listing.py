"""Which images there are, where their bytes lie, and of which class each is."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.task.data.listed_once import listed
from paceline.task.data.sources.files import NOT_READ, skipped_files, walk_files, wanted_by
from paceline.task.data.sources.listing import SPLIT_NAMES, Skipped
from paceline.task.data.sources.named import IMAGE_SUFFIXES
from paceline.task.data.storage.bytes import ByteFile, Storage
from paceline.task.data.storage.remote import is_remote, name_of
from paceline.task.data.storage.watch import State, state_of

MOST_CLASSES = 2**20  # a number above it is an id or a time, and no class


@dataclass(frozen=True)
class ImageEntry:
    """An image: a name for people, the number of its file, the place of its bytes in the file, and its class."""

    name: str
    file: int
    start: int
    size: int
    label: int
    held_out: bool | None = None  # as the name of its folder says; None where it does not


@dataclass(frozen=True)
class ImageListing:
    """The images in the order of their names, the files that hold them, and the names of the classes."""

    files: tuple[str, ...]
    entries: tuple[ImageEntry, ...]
    classes: tuple[str, ...]
    states: tuple[State | None, ...] = ()  # of the files when they were listed; None of remote ones
    skipped: tuple[Skipped, ...] = ()  # what of a folder is not read


def list_images(source: str, storage: Storage, include: tuple[str, ...] = ()) -> ImageListing:
    """Return the images of a folder of folders, of a tar file, or of a folder of tar files.

    With patterns to `include` those alone whose names match one, inside of a tar file too. Raises DataError where there
    are none, or one has no class.
    """
    return listed(("images", source, include), lambda: _list_images(source, storage, _Included(include)))


class _Included:
    """Which images are wanted by their names; `others` are the names of those that are not."""

    def __init__(self, include: tuple[str, ...]) -> None:
        self.include, self.others = include, list[str]()
        self._wanted = wanted_by(include, lambda name: True)

    def __call__(self, name: str) -> bool:
        """Return whether an image is wanted."""
        if wanted := self._wanted(name):
            return wanted
        self.others.append(name)
        return False

    def none_in(self, where: str) -> DataError:
        """Return the error of no image at all."""
        if self.others:
            return DataError(
                f"'{where}' holds no images that are wanted", f"none of {len(self.others):,} matches include = "
                f"{list(self.include)}, such as {self.others[0]}", 'patterns of names, such as include = ["cat/*.png"]',
            )  # fmt: skip
        return DataError(f"'{where}' holds no images", f"images end in {' '.join(IMAGE_SUFFIXES)}", "check the path")

    def left(self) -> dict[str, list[str]]:
        """Return what is told of the images that are not read."""
        return {f"{NOT_READ}: include names others": self.others} if self.others else {}


def _list_images(source: str, storage: Storage, included: _Included) -> ImageListing:
    path = Path(source).expanduser()
    if (name_of(source) if is_remote(source) else source).endswith(".tar"):
        return _of_tars([source if is_remote(source) else str(path)], storage, included)
    if is_remote(source):
        raise DataError(
            f"'{source}' is a remote folder of images", "each of them would be a request of its own",
            "pack them into tar files, and name one",
        )  # fmt: skip
    if not path.is_dir():
        raise DataError(f"'{source}' is not there", f"there is no folder '{path}'", "check the path")
    tars = sorted(str(each) for each in path.glob("*.tar"))
    return _of_tars(tars, storage, included) if tars else _of_folder(path, included)


def _of_folder(root: Path, included: _Included) -> ImageListing:
    """Return the images below the folders of a folder, whose names are the classes."""
    odd: dict[str, list[str]] = {}
    there = sorted(root / file.name for file in walk_files(root, frozenset(), odd))
    images = [each for each in there if each.suffix.lower() in IMAGE_SUFFIXES]
    found = [each for each in images if included(each.relative_to(root).as_posix())]
    others = [str(each.relative_to(root)) for each in there if each.suffix.lower() not in IMAGE_SUFFIXES]
    if not found:
        raise included.none_in(str(root))
    names = [each.relative_to(root) for each in found]
    if loose := next((name for name in names if len(name.parts) < 2), None):
        raise DataError(f"'{root / loose}' has no class", "it lies in no folder", "a folder for each class of images")
    splits = _splits(names)
    kept = [name for name in names if splits.get(name.parts[0]) != "test"]
    held_out = {folder: split == "validation" for folder, split in splits.items()}
    if not any(split == "validation" for split in splits.values()):
        held_out = {}
    if all(held_out.get(name.parts[0]) for name in kept):
        raise DataError(f"'{root}' holds nothing to train on", f"its folders are {', '.join(splits)}", "a folder train")
    level = 1 if splits else 0
    classes = tuple(sorted({name.parts[level] for name in kept}))
    states = tuple(state_of((root / name).stat()) for name in kept)
    entries = tuple(
        ImageEntry(str(name), number, 0, states[number].size, classes.index(name.parts[level]),
                   held_out.get(name.parts[0]))
        for number, name in enumerate(kept)
    )  # fmt: skip
    left = {f"{NOT_READ}: of another kind": others,
            f"{NOT_READ} for a test": [str(name) for name in names if splits.get(name.parts[0]) == "test"],
            **included.left()}  # fmt: skip
    skipped = skipped_files({why: files for why, files in left.items() if files}, odd)
    return ImageListing(tuple(str(root / name) for name in kept), entries, classes, states, skipped)


def _splits(names: list[Path]) -> dict[str, str]:
    """Return the split of each folder where all are called after splits and have folders of classes, else nothing."""
    found = {name.parts[0]: SPLIT_NAMES.get(name.parts[0].lower(), "") for name in names}
    return found if all(found.values()) and all(len(name.parts) > 2 for name in names) else {}


def _of_tars(paths: list[str], storage: Storage, included: _Included) -> ImageListing:
    """Return the images of tar files. An image's class is the number in the file beside it that ends in `.cls`, or,
    where there are no such files, the name of its folder."""
    found: list[tuple[str, int, int, int, str]] = []
    states: list[State | None] = []
    ends_early: list[str] = []
    odd: dict[str, list[str]] = {}
    without, by_number = "", False
    for number, path in enumerate(paths):
        states.append(None if is_remote(path) else storage.state(path))
        members = _members(path, storage, odd, ends_early)
        classes = {_stem(member.name): member for member in members if member.name.lower().endswith(".cls")}
        file = storage.open(path)
        for member in members:
            if not member.name.lower().endswith(IMAGE_SUFFIXES) or not included(member.name.removeprefix("./")):
                continue
            name, beside = f"{path}: {member.name}", classes.get(_stem(member.name))
            folder = member.name.removeprefix("./").rpartition("/")[0].rpartition("/")[2]
            label = _number(file, beside, name) if beside else folder
            by_number, without = by_number or beside is not None, without if beside else without or name
            if not label:
                raise DataError(
                    f"{name} has no class", "no .cls lies beside it, and it is in no folder", "add a .cls file"
                )
            found.append((name, number, member.offset_data, member.size, label))
    if by_number and without:
        raise DataError(
            f"{without} has no class",
            "no .cls lies beside it, and others have one",
            "add its .cls file, or leave out all",
        )
    if not found:
        raise included.none_in(paths[0])
    left = {"without the blocks of zeros at its end, read up to the last whole file": ends_early} if ends_early else {}
    left |= included.left()
    labels = {each[-1] for each in found}
    numbered = all(label.isdecimal() for label in labels)
    ordered = tuple(map(str, range(max(map(int, labels)) + 1))) if numbered else tuple(sorted(labels))
    places = {label: at for at, label in enumerate(ordered)}
    entries = tuple(ImageEntry(*each[:-1], places[str(int(each[-1])) if numbered else each[-1]]) for each in found)
    return ImageListing(tuple(paths), entries, ordered, tuple(states), skipped_files(left, odd))


def _members(path: str, storage: Storage, odd: dict[str, list[str]], ends_early: list[str]) -> list[tarfile.TarInfo]:
    """Return the files of a tar file but hidden ones. Raises DataError where it is none, or cut within a file.

    Names of links to images are added to `odd`, and of what other programs hide beside them; the path to `ends_early`
    where no block of zeros says that the last file is the last one.
    """
    file = storage.open(path)
    try:
        with tarfile.open(fileobj=io.BufferedReader(_PlacedBytes(file)), mode="r:") as tar:
            entries, end = list(tar), tar.offset
    except (tarfile.TarError, ValueError) as error:  # of a number in a header that is none
        raise DataError(f"{path} is not a tar file", str(error), "write or copy it again, unpacked") from error
    # The library takes a header that is damaged or half there for the end, which are blocks of zeros.
    last = bytes(file.read(min(end, file.size), min(end + tarfile.BLOCKSIZE, file.size)))
    if end == file.size and entries:  # the last file is whole, with what fills its block: GNU tar reads it too
        ends_early.append(path)
    elif len(last) < tarfile.BLOCKSIZE or last.strip(b"\0"):
        raise DataError(
            f"{path} is cut short or damaged", f"neither a file nor the end of all begins at its byte {end:,}",
            "write or copy it again",
        )  # fmt: skip
    members = []
    for entry in entries:
        is_image = entry.name.lower().endswith(IMAGE_SUFFIXES)
        if entry.name.rpartition("/")[2].startswith(".") or entry.name.startswith("__MACOSX/"):
            if is_image:
                odd.setdefault("hidden", []).append(entry.name)
        elif entry.isreg() and not entry.issparse():
            members.append(entry)
        elif is_image:
            odd.setdefault("a link" if entry.islnk() or entry.issym() else "no plain file", []).append(entry.name)
    newest = {member.name: member for member in members}  # a file that is added again takes the place of the older one
    for member in members:
        if newest[member.name] is not member and member.name.lower().endswith(IMAGE_SUFFIXES):
            odd.setdefault("an older file of a name that comes again", []).append(member.name)
    members = list(newest.values())
    for member in members:
        if member.offset_data + member.size > file.size:
            raise DataError(
                f"{path} is cut short", f"{member.name} ends after byte {file.size:,}", "write or copy it again"
            )
    return members


def _stem(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _number(file: ByteFile, member: tarfile.TarInfo, name: str) -> str:
    text = file.read(member.offset_data, member.offset_data + member.size).tobytes().decode("ascii", "replace").strip()
    if not text.isdecimal() or len(text) > 9 or int(text) >= MOST_CLASSES:
        raise DataError(
            f"{name} has no class", f"{member.name} holds {text[:20]!r}",
            f"the number of a class, from 0 to {MOST_CLASSES - 1:,}",
        )  # fmt: skip
    return text


class _PlacedBytes(io.RawIOBase):
    """A file of bytes, to be read by its places."""

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        stop = max(self._at, min(self._file.size, self._at + len(wanted)))
        content = self._file.read(self._at, stop) if stop > self._at else b""
        wanted[: len(content)] = bytes(content)
        self._at += len(content)
        return len(content)
