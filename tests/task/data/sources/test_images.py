"""Images of a folder and of tar files: the same pixels as Pillow alone gives, classes, and what cannot be decoded."""

from __future__ import annotations

import io
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, DataError
from paceline.run.loop.sources import open_sets
from paceline.run.process.world import World
from paceline.spec.task import DataSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec, HeldOutSetSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.source import Source, open_sources

Image = pytest.importorskip("PIL.Image")


def write_images(root: Path) -> dict[str, np.ndarray]:
    """Write square PNGs, which lose nothing, in folders of three classes; return their pixels by name."""
    generator, pixels = np.random.default_rng(1), {}
    for number in range(24):
        name = f"{('cat', 'dog', 'owl')[number % 3]}/{number:02}.png"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels[name] = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels[name]).save(root / name)
    return pixels


def write_tar(path: Path, root: Path, with_classes: bool) -> None:
    """Pack a folder of images: with their folders, or flat with a file of the class's number beside each."""
    with tarfile.open(path, "w") as tar:
        for image in sorted(root.glob("*/*.png")):
            if not with_classes:
                tar.add(image, str(image.relative_to(root)))
                continue
            tar.add(image, f"{image.stem}.png")
            content = str(("cat", "dog", "owl").index(image.parent.name)).encode()
            member = tarfile.TarInfo(f"{image.stem}.cls")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def everything(source: Source) -> dict[bytes, int]:
    batch = source.read(np.arange(source.samples))
    assert batch["images"].dtype == torch.float32 and batch["labels"].dtype == torch.int64
    rows = (batch["images"] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return {row.tobytes(): label for row, label in zip(rows, batch["labels"].tolist(), strict=True)}


@pytest.mark.parametrize("kind", ["folder", "tar", "tars", "classes", "remote"])
def test_every_image_comes_once_with_its_class(tmp_path: Path, kind: str) -> None:
    pixels = write_images(tmp_path / "images")
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "a.tar", tmp_path / "images", with_classes=kind == "classes")
    tar = str(tmp_path / "tars" / "a.tar")
    fsspec.filesystem("memory").pipe("/images/a.tar", Path(tar).read_bytes())
    source = {"folder": str(tmp_path / "images"), "tar": tar, "tars": str(tmp_path / "tars"), "classes": tar,
              "remote": "memory://images/a.tar"}[kind]  # fmt: skip
    spec = DataSpec(source, image_size=8, validation_fraction=0.25, cache_dir=str(tmp_path / "cache"))
    train, held_out = open_sources(spec, 7)
    assert held_out is not None and train.samples + held_out.samples == 24 and train.samples > held_out.samples > 0
    wanted = {each.tobytes(): ("cat", "dog", "owl").index(name[:3]) for name, each in pixels.items()}
    assert everything(train) | everything(held_out) == wanted
    assert everything(pickle.loads(pickle.dumps(train))) == everything(train)
    ids = np.array([3, 0, 3])
    train.expect(ids)  # type: ignore[attr-defined]
    assert torch.equal(train.read(ids)["images"][0], train.read(ids[:1])["images"][0])
    facts = data_facts(spec)
    assert (facts.unit, facts.documents, facts.description) == ("samples", 24, "24 images of 3 classes")


def test_an_image_is_scaled_by_its_shorter_side_and_cut_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 200  # the middle third
    Image.fromarray(wide).save(tmp_path / "a" / "0.png")
    Image.fromarray(wide[..., 0]).save(tmp_path / "a" / "1.png")  # of one channel
    batch = open_sources(DataSpec(str(tmp_path), image_size=10, validation_fraction=0.0), 7)[0].read(np.array([0, 1]))
    assert batch["images"].shape == (2, 3, 10, 10) and (batch["images"] * 255).round().unique().tolist() == [200]


def test_an_image_that_cannot_be_decoded_ends_the_run_or_counts_nothing(tmp_path: Path) -> None:
    write_images(tmp_path)
    whole = (tmp_path / "cat" / "00.png").read_bytes()
    (tmp_path / "cat" / "00.png").write_bytes(whole[:60])
    spec = DataSpec(f"images:{tmp_path}", image_size=8, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"00.png cannot be decoded\n.*bytes 0 to 60, of CRC-32 [0-9a-f]{8}"):
        open_sources(spec, 7)[0].read(np.arange(24))
    skipping = open_sources(DataSpec(spec.source, image_size=8, validation_fraction=0.0, on_bad="skip"), 7)[0]
    labels = skipping.read(np.arange(24))["labels"]
    assert labels.tolist().count(-100) == 1 and labels[0] == -100
    assert list(skipping.damaged) == [0]  # type: ignore[attr-defined]


def test_images_without_a_class_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "loose.png").write_bytes((tmp_path / "cat" / "00.png").read_bytes())
    with pytest.raises(DataError, match="has no class"):
        open_sources(DataSpec(str(tmp_path)), 7)
    (tmp_path / "t.tar").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(DataError, match="is not a tar file"):
        open_sources(DataSpec(str(tmp_path / "t.tar")), 7)


def test_a_set_of_some_of_the_classes_counts_them_as_the_task_does(tmp_path: Path) -> None:
    write_images(tmp_path / "all")
    (task, _) = open_sources(DataSpec(f"images:{tmp_path / 'all'}", image_size=8, validation_fraction=0.0), 7)
    last = sorted(path.name for path in (tmp_path / "all").iterdir())[-1]
    (tmp_path / "some").mkdir()
    (tmp_path / "all" / last).rename(tmp_path / "some" / last)
    sets = (HeldOutSetSpec("some", f"images:{tmp_path / 'some'}"),)
    spec = Task(data=DataSpec("images:x", image_size=8), evaluate=EvaluateSpec(sets=sets))
    some = open_sets(spec, World(0, 1, 0, torch.device("cpu")), task)["some"]
    labels = some.read(np.arange(some.samples))["labels"]
    assert labels.unique().tolist() == [task.classes.index(last)] == [len(task.classes) - 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_images_are_chosen_by_their_names_and_by_nothing_that_chooses_documents(tmp_path: Path, kind: str) -> None:
    pixels = write_images(tmp_path / "images")
    write_tar(tmp_path / "all.tar", tmp_path / "images", with_classes=False)
    source = str(tmp_path / ("images" if kind == "folder" else "all.tar"))
    spec = DataSpec(source, validation_fraction=0.0, image_size=8, include=("cat/*", "?0.png"))
    train, _ = open_sources(spec, 7)
    wanted = {name for name in pixels if name.startswith("cat/") or name.endswith("0.png")}
    assert set(everything(train)) == {pixels[name].tobytes() for name in wanted} and 8 < len(wanted) < len(pixels)
    assert any("include names others" in note for note in data_facts(spec).notes)
    assert open_sources(replace(spec, include=()), 7)[0].samples == len(pixels)
    with pytest.raises(DataError, match="no images that are wanted"):
        open_sources(replace(spec, include=("*.jpg",)), 7)
    for name in ("max_bytes", "score_min", "score_max", "document_tokens"):
        with pytest.raises(ConfigError, match=rf"task\.data\.{name} with images"):
            open_sources(replace(spec, **{name: 0.0 if "score" in name else 1}), 7)


def test_images_of_one_name_are_split_by_their_folders(tmp_path: Path) -> None:
    """All of them were held out: "no images are left"."""
    for at, name in enumerate(f"{kind}/{number}" for kind in ("cat", "dog") for number in range(5)):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (at, at, at)).save(tmp_path / name / "image.png")
    train, held_out = open_sources(DataSpec(str(tmp_path), image_size=8), 7)
    assert held_out is not None and (train.samples, held_out.samples) == (9, 1)
