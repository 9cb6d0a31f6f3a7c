"""Folders of images as strangers have them: split already, of other kinds, with other files beside them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources
from paceline.task.data.sources.named import kind_of_source

pytest.importorskip("PIL")
PLAIN = [f"{kind}/{at}.png" for kind in ("cat", "dog") for at in range(4)]


def write(folder: Path, names: Iterable[str], mode: str = "RGB") -> str:
    from PIL import Image

    for at, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(at).integers(0, 255, (9, 11, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path)
    return str(folder)


def opened(source: str, **options: Any) -> Any:
    assert kind_of_source(source)[0] == "images"
    return open_sources(DataSpec(source, image_size=8, validation_fraction=0.25, **options), 7)


@pytest.mark.parametrize("held_out", ["val", "validation", "dev"])
def test_folders_called_after_splits_are_the_splits(tmp_path: Path, held_out: str) -> None:
    names = [f"{split}/{name}" for split in ("train", "test", held_out) for name in PLAIN]
    train, validation = opened(write(tmp_path, names))
    assert train.classes == ("cat", "dog") and train.samples == len(PLAIN) == validation.samples
    assert {train.listing.entries[at].name.split("/")[0] for at in train.chosen} == {"train"}
    assert {train.listing.entries[at].name.split("/")[0] for at in validation.chosen} == {held_out}
    assert [str(each) for each in train.listing.skipped] == ["8 not read for a test (test/cat/0.png, ...)"]


def test_without_a_folder_for_validation_a_part_of_those_for_training_is_held_out(tmp_path: Path) -> None:
    train, validation = opened(write(tmp_path, [f"{split}/{name}" for split in ("train", "test") for name in PLAIN]))
    assert train.samples + validation.samples == len(PLAIN)


def test_images_for_a_test_alone_are_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        opened(write(tmp_path, [f"val/{name}" for name in PLAIN]))


@pytest.mark.parametrize(("suffix", "mode"), [
    (".tif", "RGB"), (".gif", "P"), (".JPG", "RGB"), (".png", "L"), (".png", "RGBA"), (".png", "1"), (".jpg", "CMYK"),
])  # fmt: skip
def test_images_of_any_kind_become_three_channels(tmp_path: Path, suffix: str, mode: str) -> None:
    train, _ = opened(write(tmp_path, [name.replace(".png", suffix) for name in PLAIN], mode))
    assert tuple(train.read(np.arange(train.samples))["images"].shape) == (train.samples, 3, 8, 8)


def test_other_files_beside_images_are_told_and_are_no_table(tmp_path: Path) -> None:
    source = write(tmp_path, PLAIN)
    for name in ("labels.csv", "README.md", "cat/Thumbs.db"):
        (tmp_path / name).write_text("file,label\n")
    train, _ = opened(source)
    assert [str(each) for each in train.listing.skipped] == ["3 not read: of another kind (README.md, ...)"]


def test_pictures_among_documents_do_not_make_images_of_them(tmp_path: Path) -> None:
    source = write(tmp_path, [f"pictures/{at}.png" for at in range(9)])
    (tmp_path / "chapter.md").write_text("# One\n")
    assert kind_of_source(source)[0] == "text"
