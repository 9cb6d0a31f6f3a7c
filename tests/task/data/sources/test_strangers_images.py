"""Folders of images as strangers have them: split already, of other kinds, with other files beside them."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DamagedData, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources
from paceline.task.data.sources.images.decoding import decoded
from paceline.task.data.sources.images.listing import ImageEntry
from paceline.task.data.sources.named import kind_of_source

pytest.importorskip("PIL")
NO_WHOLE_TAR = r"tar file|cut short"
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
    (".avif", "RGB"), (".jp2", "RGB"),
])  # fmt: skip
def test_images_of_any_kind_become_three_channels(tmp_path: Path, suffix: str, mode: str) -> None:
    from PIL import features

    if (needs := {".avif": "avif", ".jp2": "jpg_2000"}.get(suffix)) and not features.check(needs):
        pytest.skip("Pillow was built without it")
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


def square_of(image: Any, kind: str, **options: Any) -> np.ndarray:
    """Return the square of 4 pixels of an image that is written as a kind of file and read again."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    content = file.getvalue()
    return decoded(content, ImageEntry("an image", 0, 0, len(content), 0), 4)


@pytest.mark.parametrize(("kind", "pixels"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2"), ("PPM", "<i4")])
def test_sixteen_bits_become_their_upper_eight(kind: str, pixels: str) -> None:
    """Pillow's own conversion takes what is above 255 of 65,535 for white."""
    from PIL import Image

    values = np.array([[0, 255, 256, 32768], [65535, 1000, 12345, 60000]] * 2, pixels)
    found = square_of(Image.fromarray(values), kind)
    assert found[..., 0].tolist() == (values.astype(int) >> 8).tolist() and (found == found[..., :1]).all()


@pytest.mark.parametrize("pixels", ["i4", "f4"])
def test_numbers_without_a_black_and_a_white_are_no_image(pixels: str) -> None:
    from PIL import Image

    with pytest.raises(DamagedData, match="without a black and a white"):
        square_of(Image.fromarray(np.ones((4, 4), pixels)), "TIFF")


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_images_are_upright(turned: int, mode: str) -> None:
    """By the table of the EXIF standard, held against turns of numpy's."""
    from PIL import Image

    upright = np.arange(16, dtype=np.uint16).reshape(4, 4) * 16
    stored = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.T,
              6: np.rot90(upright), 7: upright[::-1, ::-1].T, 8: np.rot90(upright, -1)}[turned]  # fmt: skip
    exif = Image.Exif()
    exif[0x112] = turned
    values = stored.astype("u1") if mode == "RGB" else stored * 256
    image = Image.fromarray(np.ascontiguousarray(values))
    assert square_of(image, "PNG", exif=exif)[..., 0].tolist() == upright.tolist()


def test_an_image_as_thin_as_a_line_takes_no_memory_for_what_is_cut_off() -> None:
    from PIL import Image

    line = np.zeros((1, 60_000), np.uint8)
    line[0, 30_000 - 100 : 30_000 + 100] = 200
    for pixels in (line, line.T):
        content = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(content, "PNG")
        # Scaled as a whole it would be 1,024 times 61,440,000 pixels: more than there is.
        square = decoded(content.getvalue(), ImageEntry("", 0, 0, 0, 0), 1024)
        assert square.shape == (1024, 1024, 3) and (square == 200).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_whatever_is_wrong_with_an_image_it_is_told_as_damaged(kind: str) -> None:
    from PIL import Image

    generator, whole = np.random.default_rng(3), io.BytesIO()
    Image.fromarray(generator.integers(0, 255, (9, 11, 3), dtype=np.uint8)).save(whole, kind)
    for _ in range(25):
        content = np.frombuffer(whole.getvalue(), np.uint8).copy()
        at = generator.integers(0, min(len(content), 120), 3)
        content[at] = generator.integers(0, 256, 3)
        cut = content[: generator.integers(0, 2 * len(content))].tobytes()
        try:
            assert decoded(cut, ImageEntry("an image", 0, 0, len(cut), 0), 4).shape == (4, 4, 3)
        except DamagedData as error:
            assert "an image" in error.what


def test_the_first_frame_of_several_is_taken(tmp_path: Path) -> None:
    from PIL import Image

    first, *others = (Image.fromarray(np.full((9, 11), value, np.uint8)) for value in (10, 200, 90))
    for at, suffix in enumerate(("gif", "png", "tif")):
        (tmp_path / "a").mkdir(exist_ok=True)
        first.save(tmp_path / "a" / f"{at}.{suffix}", save_all=True, append_images=others)
    source, _ = open_sources(DataSpec(str(tmp_path), image_size=8, validation_fraction=0.0), 7)
    assert (source.read(np.arange(3))["images"] * 255).round().unique().tolist() == [10]


def test_names_that_are_no_text_and_links_in_a_circle(tmp_path: Path) -> None:
    source = write(tmp_path, PLAIN)
    (tmp_path / "cat/0.png").rename(tmp_path / "cat" / os.fsdecode(b"\xff.png"))
    (tmp_path / "dog").rename(tmp_path / os.fsdecode(b"d\xff"))
    (tmp_path / "cat/self.png").symlink_to("self.png")
    train, validation = opened(source)
    assert train.samples + validation.samples == len(PLAIN)
    assert [each.why for each in train.listing.skipped] == ["not read: a link to nothing"]


def tar_of(path: Path, members: dict[str, bytes | None], links: dict[str, str] | None = None) -> Path:
    """Write a tar file; a member without content is an image."""
    from PIL import Image

    image = io.BytesIO()
    Image.fromarray(np.full((9, 11, 3), 7, np.uint8)).save(image, "PNG")
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry, content = tarfile.TarInfo(name), image.getvalue() if content is None else content
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.LNKTYPE, target
            tar.addfile(entry)
    return path


def tar_source(path: Path) -> Any:
    return open_sources(DataSpec(str(path), image_size=8, validation_fraction=0.0), 7)[0]


def test_what_other_programs_leave_in_tars_is_no_image(tmp_path: Path) -> None:
    members = {"./cat/0.png": None, "cat/._0.png": b"junk", "__MACOSX/cat/._0.png": b"junk", "x/a.b.c.png": None}
    source = tar_source(tar_of(tmp_path / "a.tar", members, {"dog/0.png": "./cat/0.png"}))
    assert source.classes == ("cat", "x") and source.read(np.arange(source.samples))["labels"].tolist() == [0, 1]
    assert [str(each) for each in source.listing.skipped] == [
        "1 not read: a link (dog/0.png)", "2 not read: hidden (__MACOSX/cat/._0.png, ...)"
    ]  # fmt: skip


def test_a_file_that_is_added_to_a_tar_again_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    """As it does where the tar is unpacked: both were trained on."""
    from PIL import Image

    path = tmp_path / "a.tar"
    for shades in ((10, 20, 30, 40), (200,)):  # the second time by `tar --append`
        with tarfile.open(path, "a") as tar:
            for number, shade in enumerate(shades):
                content = io.BytesIO()
                Image.new("RGB", (4, 4), (shade,) * 3).save(content, "PNG")
                entry = tarfile.TarInfo(f"{'ab'[number % 2]}/{number}.png")
                entry.size = len(content.getvalue())
                tar.addfile(entry, io.BytesIO(content.getvalue()))
    data = DataSpec(str(path), image_size=4, normalise="none", validation_fraction=0.0)
    train, _ = open_sources(data, 1)
    shades_read = (train.read(np.arange(train.samples))["images"][:, 0, 0, 0] * 255).round().int().tolist()
    assert sorted(shades_read) == [20, 30, 40, 200]
    assert [str(each) for each in train.listing.skipped] == [
        "1 not read: an older file of a name that comes again (a/0.png)"
    ]


def test_bytes_that_are_no_image_are_told_alike_each_time() -> None:
    entry = ImageEntry("a/1.png", 0, 0, 0, 0)
    with pytest.raises(DamagedData) as told:
        decoded(b"", entry, 4)
    assert "no image that Pillow knows" in told.value.because and "0x" not in told.value.because


@pytest.mark.parametrize(("members", "because"), [
    ({"./0.png": None}, "in no folder"),
    ({"train/0.png": None, "train/0.cls": b"3", "train/1.png": None}, "others have one"),
    ({"0.png": None, "0.cls": b"1700000000"}, "holds"), ({"0.png": None, "0.cls": b"-1"}, "holds"),
])  # fmt: skip
def test_an_image_of_a_tar_without_a_class_is_told(
    tmp_path: Path, members: dict[str, bytes | None], because: str
) -> None:
    with pytest.raises(DataError, match="has no class") as caught:
        tar_source(tar_of(tmp_path / "a.tar", members))
    assert because in caught.value.because


def test_a_tar_that_breaks_off_within_a_file_is_refused(tmp_path: Path) -> None:
    """The library takes what is not a whole header for the end, and the labels beside images were lost."""
    path = tar_of(tmp_path / "a.tar", {"a/0.png": None, "a/0.cls": b"3", "b/1.png": None, "b/1.cls": b"0"})
    with tarfile.open(path) as tar:
        ends = [member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers()]
    whole = path.read_bytes()
    assert tar_source(path).read(np.arange(2))["labels"].tolist() == [3, 0]
    for cut in [*range(0, ends[-1], 128), *(start + 1 for start in range(0, ends[-1], 512))]:
        if cut not in ends:
            path.write_bytes(whole[:cut])
            with pytest.raises(DataError, match=NO_WHOLE_TAR):
                tar_source(path)
    path.write_bytes(whole[:1024] + b"x" * 512 + whole[1536:])  # a header of it is damaged
    with pytest.raises(DataError, match=NO_WHOLE_TAR):
        tar_source(path)


def test_a_tar_without_its_end_is_read_up_to_its_last_whole_file_and_told(tmp_path: Path) -> None:
    """As GNU tar reads it. One that broke off between two files looks the same: the note says what to look for."""
    path = tar_of(tmp_path / "a.tar", {"a/0.png": None, "a/0.cls": b"3", "b/1.png": None, "b/1.cls": b"0"})
    with tarfile.open(path) as tar:
        ends = [member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers()]
    whole = path.read_bytes()
    assert tar_source(path).listing.skipped == ()
    for end, labels in ((ends[-1], [3, 0]), (ends[1], [3]), (ends[-1] + 512, [3, 0])):
        path.write_bytes(whole[:end])
        source = tar_source(path)
        assert source.read(np.arange(source.samples))["labels"].tolist() == labels
        told = "".join(map(str, source.listing.skipped))
        assert ("without the blocks of zeros at its end" in told and str(path) in told) == (end in ends)
    path.write_bytes(whole[: ends[2]])  # the class of its last image is lost
    with pytest.raises(DataError, match=r"b/1.png has no class"):
        tar_source(path)


def test_a_packed_tar_says_how_to_unpack_it(tmp_path: Path) -> None:
    for name in ("a.tar.gz", "a.tgz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=r"gunzip"):
            open_sources(DataSpec(str(tmp_path / name)), 7)
