"""`inspect`: what it says of documents, against a walk of them; its packing is that of the samples trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.inspect import inspect
from paceline.task.data.prepare.inspect_images import inspect_images
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources

ROW = 64


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_what_is_said_of_documents_is_what_they_are(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(1)
    texts = ["x" * size for size in random.integers(1, 150, 300).tolist()]  # of equal lengths many are equal
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options: dict[str, Any] = {"seq_len": ROW, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}
    data = DataSpec(str(tmp_path / "a.jsonl"), **options)
    if kind == "shards":
        prepare(data, tmp_path / "shards")
        data = DataSpec(str(tmp_path / "shards"), **options)
    found = inspect(data, samples=2)
    facts = found.splits["train"]
    lengths = np.array([len(text) + 1 for text in texts])
    assert (facts.documents, facts.tokens, facts.samples) == (300, lengths.sum(), (lengths.sum() - 1) // ROW)
    assert facts.lengths["longest"] == lengths.max() and facts.lengths["mean"] == pytest.approx(
        lengths.mean(), abs=0.01
    )
    assert facts.duplicates == pytest.approx(1 - len(set(texts)) / 300) and facts.hashed == 300
    assert facts.padded == pytest.approx(1 - lengths.mean() / lengths.max())
    ends = lengths.cumsum()
    assert facts.cut == pytest.approx(np.mean((ends - lengths) // ROW != (ends - 1) // ROW))
    packed = DataSpec(data.source, rows="packed", **options)
    labels = open_sources(packed, 7)[0]
    counted = (labels.read(np.arange(labels.samples))["labels"] >= 0).float().mean()
    assert facts.packed == pytest.approx(1 - float(counted))
    assert len(found.samples) == 2 and all(set(text) == {"x"} for text in found.samples)


def test_what_is_said_of_images_is_what_they_are(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    root = tmp_path / "pictures"
    pixels = {}
    for number in range(24):
        split, label = ("train", "val")[number % 6 == 0], ("cat", "dog", "owl")[number % 3]
        file = root / split / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels[file] = np.random.default_rng(number).integers(0, 256, (10 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels[file]).save(file)
    first, second = root / "train" / "cat" / "3.png", root / "val" / "cat" / "6.png"
    second.write_bytes(first.read_bytes())  # a leak from one split into the other
    (root / "train" / "dog" / "torn.png").write_bytes(first.read_bytes()[:200])
    found = inspect_images(DataSpec(str(root), image_size=10), str(root), samples=2)
    train, validation = found.splits["train"], found.splits["validation"]
    assert train.classes == {"cat": 4, "dog": 9, "owl": 8} and validation.classes == {"cat": 4, "dog": 0, "owl": 0}
    assert (train.images, train.looked_at, train.damaged) == (21, 21, 1)
    assert train.duplicates == 0 and validation.duplicates == 1 / 4
    heights = [each.shape[0] for file, each in pixels.items() if "train" in file.parts]
    assert train.shorter_sides["least"] == min(heights) and train.shorter_sides["most"] == max(heights)
    assert found.what == "25 images of 3 classes" and all(" -> " in each for each in found.samples)
    assert any("torn.png cannot be decoded" in each for each in found.told)
    assert any("validation has no image of dog, owl" in each for each in found.told)
    read = open_sources(DataSpec(str(root), image_size=10, on_bad="skip"), 7)[0].read(np.arange(21))
    whole = read["images"][read["labels"] >= 0]
    assert train.mean == pytest.approx(whole.mean((0, 2, 3)).tolist(), abs=1e-5)
    assert train.deviation == pytest.approx(
        whole.permute(1, 0, 2, 3).flatten(1).std(1, correction=0).tolist(), abs=1e-5
    )


def test_images_are_inspected_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    for number in range(8):
        (tmp_path / "in" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (number, 0, 0)).save(tmp_path / "in" / str(number % 2) / f"{number}.png")
    source = str(tmp_path / "in")
    assert main(["data", "inspect", source, "--samples", "1", "--set", "task.data.image_size=8"]) == 0
    shown = capsys.readouterr().out
    assert "8 images of 2 classes" in shown and "squares of 8 pixels" in shown and "image 1" in shown
    assert main(["data", "inspect", source, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(each["images"] for each in told["splits"].values()) == 8 and told["image_size"] == 224


MIXTURE = """[task]
name = "mixed"
[[task.data.mix]]
source = "one.txt"
[[task.data.mix]]
source = "two.txt"
"""


@pytest.mark.parametrize("words", [["prepare", "{}", "out"], ["inspect", "{}"], ["copies", "{}", "out"],
                                   ["score", "run", "{}", "out"]])  # fmt: skip
def test_a_mixture_is_not_taken_for_the_source_that_it_stands_in_the_place_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "mixed.toml").write_text(MIXTURE)
    given = [word.format(tmp_path / "mixed.toml").replace("out", str(tmp_path / "out")) for word in words]
    assert main(["data", *given]) == 2
    assert "are a mixture" in (told := capsys.readouterr().err) and "one.txt, two.txt" in told
    assert not (tmp_path / "out").exists()
