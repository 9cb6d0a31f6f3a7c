"""What is drawn for images follows from the seed and the position, and is computed in whole numbers: pixel by pixel
against Python's own, against torch's bilinear scaling, and whatever rows are beside a row."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_shared import plan_of

from paceline.errors import ConfigError
from paceline.run.loop.loader import BatchStream
from paceline.spec.data.augment import AugmentSpec
from paceline.spec.data.mix import MixSpec
from paceline.spec.data.rules import check_data
from paceline.spec.layout import Layout
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources
from paceline.task.data.sources.images import source as image_source
from paceline.task.data.sources.images.choices import COLUMNS, choices_of, unchanged
from paceline.task.data.sources.images.finish import finish_images, table_of
from paceline.task.data.sources.images.normals import NORMALS

SIDE, SIZE = 12, 8
EVERYTHING = AugmentSpec(SIDE, 0.2, 2.0, True, 0.4, 0.5, 0.6)
PIXELS = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (9, SIDE, SIDE, 3), dtype=np.uint8))


def by_hand(pixels: Any, choices: list[int], size: int) -> list[list[list[int]]]:
    """Return an image's values after crop, flip and colours: Python's whole numbers, one pixel after the other."""
    left, top, width, height, flip, *factors = choices
    side = len(pixels)

    def between(start: int, length: int, place: int) -> tuple[int, int, int]:
        at = min(max(start + (2 * place + 1) * length // (2 * size) - 1024, 0), (side - 1) * 2048)
        return at // 2048, min(at // 2048 + 1, side - 1), at % 2048

    def clamp(value: int) -> int:
        return min(255, max(0, value))

    def gray(pixel: list[int]) -> int:
        return (77 * pixel[0] + 150 * pixel[1] + 29 * pixel[2]) // 256

    out = []
    for row in range(size):
        y0, y1, fy = between(top, height, row)
        line = []
        for column in range(size):
            x0, x1, fx = between(left, width, size - 1 - column if flip else column)
            pixel = []
            for channel in range(3):
                upper, lower = ([int(pixels[y][x][channel]) for x in (x0, x1)] for y in (y0, y1))
                ends = [upper[k] * (2048 - fy) + lower[k] * fy for k in (0, 1)]
                pixel.append((ends[0] * (2048 - fx) + ends[1] * fx + 2**21) // 2**22)
            line.append([clamp((value * factors[0] + 2048) // 4096) for value in pixel])
        out.append(line)
    mean = sum(gray(pixel) for line in out for pixel in line) // size**2
    out = [[[clamp(mean + ((v - mean) * factors[1] + 2048) // 4096) for v in pixel] for pixel in line] for line in out]
    return [
        [[clamp(gray(pixel) + ((v - gray(pixel)) * factors[2] + 2048) // 4096) for v in pixel] for pixel in line]
        for line in out
    ]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(2, 14))
def test_every_pixel_is_what_whole_numbers_say(seed: int, position: int, size: int) -> None:
    positions = np.arange(position, position + 2)
    choices = choices_of(EVERYTHING, seed, positions, SIDE)
    found = finish_images(PIXELS[:2], torch.from_numpy(choices), table_of("none"), size)
    values = (found * 255).round().to(torch.int64).permute(0, 2, 3, 1).tolist()
    for row in range(2):
        assert values[row] == by_hand(PIXELS[row].tolist(), choices[row].tolist(), size)
    assert torch.equal(found, torch.tensor(values, dtype=torch.float32).permute(0, 3, 1, 2) / 255)


def test_scaling_is_torchs_but_for_rounding() -> None:
    for size in (5, 8, 12, 20):
        found = finish_images(PIXELS, torch.from_numpy(unchanged(len(PIXELS), SIDE)), table_of("none"), size)
        wanted = F.interpolate(PIXELS.permute(0, 3, 1, 2).double(), size=(size, size), mode="bilinear")
        assert (found.double() * 255 - wanted).abs().max() <= 0.5 + 255 * 2 / 2048, "weights are in 1/2,048"
    assert torch.equal(
        finish_images(PIXELS, torch.from_numpy(unchanged(len(PIXELS), SIDE)), table_of("none"), SIDE),
        finish_images(PIXELS, None, table_of("none"), SIDE),
    ), "the whole square, as large as it is, stays as it is"


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    positions = np.arange(100, 100 + len(PIXELS))
    choices = torch.from_numpy(choices_of(EVERYTHING, 7, positions, SIDE))
    whole = finish_images(PIXELS, choices, table_of("imagenet"), SIZE)
    order = torch.randperm(len(PIXELS), generator=torch.Generator().manual_seed(1))
    again = choices_of(EVERYTHING, 7, positions[order.numpy()], SIDE)
    mixed = finish_images(PIXELS[order], torch.from_numpy(again), table_of("imagenet"), SIZE)
    assert torch.equal(mixed, whole[order])
    for row in range(len(PIXELS)):
        alone = torch.from_numpy(choices_of(EVERYTHING, 7, positions[row : row + 1], SIDE))
        assert torch.equal(finish_images(PIXELS[row : row + 1], alone, table_of("imagenet"), SIZE)[0], whole[row])
    assert finish_images(PIXELS[:0], None, table_of("none"), SIDE).shape == (0, 3, SIDE, SIDE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it compares a CUDA device with the CPU")
def test_a_device_gives_the_same_bits() -> None:
    choices = torch.from_numpy(choices_of(EVERYTHING, 7, np.arange(len(PIXELS)), SIDE))
    here = finish_images(PIXELS, choices, table_of("imagenet"), SIZE)
    there = finish_images(PIXELS.cuda(), choices.cuda(), table_of("imagenet").cuda(), SIZE)
    assert torch.equal(there.cpu(), here)


def test_draws_fill_their_ranges_and_no_more() -> None:
    choices = choices_of(EVERYTHING, 3, np.arange(20_000), SIDE)
    found = dict(zip(COLUMNS, choices.T, strict=True))
    whole = SIDE << 11
    for start, length in (("left", "width"), ("top", "height")):
        assert found[start].min() >= 0 and (found[start] + found[length]).max() <= whole
        assert found[length].max() <= whole and found[length].min() > 0.3 * whole
    share = found["width"] * found["height"] / whole**2
    assert share.min() > 0.19 and 0.55 < share.mean() < 0.61, "crops that a side cuts short are a little smaller"
    sides = found["width"] / found["height"]
    assert 0.49 < sides.min() < 0.52 and 1.94 < sides.max() < 2.01 and 0.45 < (sides > 1).mean() < 0.55
    assert 0.48 < found["flip"].mean() < 0.52 and set(found["flip"].tolist()) == {0, 1}
    for name, most in (("brightness", 0.4), ("contrast", 0.5), ("saturation", 0.6)):
        factors = found[name] / 4096 - 1
        assert abs(factors.min() + most) < 0.01 and abs(factors.max() - most) < 0.01 and abs(factors.mean()) < 0.01
    apart = choices[:, [2, 4, 5, 6, 7]].T  # a crop's place depends on its sides, the others on nothing
    assert np.abs(np.corrcoef(apart) - np.eye(5)).max() < 0.03
    other = choices_of(EVERYTHING, 4, np.arange(20_000), SIDE)
    assert abs(np.corrcoef(choices[:, 5], other[:, 5])[0, 1]) < 0.03, "another seed draws other numbers"
    assert np.array_equal(choices_of(AugmentSpec(SIDE), 3, np.arange(5), SIDE), unchanged(5, SIDE))


def test_the_table_is_mean_and_deviation() -> None:
    for name, (means, deviations) in NORMALS.items():
        table = table_of(name)
        assert table.dtype == torch.float32 and table.shape == (3, 256)
        for channel in range(3):
            exact = (np.arange(256) / 255 - means[channel]) / deviations[channel]
            assert np.abs(table[channel].numpy() - exact).max() < 3e-7


def write_images(root: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        (root / str(number % 2)).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        image.fromarray(pixels).save(root / str(number % 2) / f"{number:02}.png")


def test_a_source_draws_by_position_and_a_device_finishes_the_same(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    data = DataSpec(str(tmp_path / "images"), image_size=SIZE, augment=EVERYTHING, normalise="half",
                    validation_fraction=0.25, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    train, held_out = open_sources(data, 7)
    assert held_out is not None
    ids = np.array([1, 1, 0])
    first = train.read(ids, np.array([5, 105, 6]))["images"]
    assert first.shape == (3, 3, SIZE, SIZE) and not torch.equal(first[0], first[1]), "an image is another each time"
    assert torch.equal(train.read(ids[1:2], np.array([105]))["images"][0], first[1])
    assert not torch.equal(open_sources(data, 8)[0].read(ids, np.array([5, 105, 6]))["images"], first)
    plain = train.read(ids)["images"]
    assert torch.equal(plain[0], plain[1]), "an evaluation draws nothing"
    assert torch.equal(held_out.read(ids[2:], ids[2:])["images"], held_out.read(ids[2:])["images"])
    streams = [BatchStream(train, 7, plan_of(Layout(), batch=6, micro_batch=3), 0, torch.device("cpu")) for _ in "ab"]
    streams[1].finishing = streams[1].source  # as on a device
    batches = [stream.at(12) for stream in streams]
    assert streams[1].on_host(12).micro_batches[0].data["pixels"].dtype == torch.uint8, "bytes go to the device"
    for one, other in zip(batches[0].micro_batches, batches[1].micro_batches, strict=True):
        assert torch.equal(one.data["images"], other.data["images"])
        assert torch.equal(one.data["labels"], other.data["labels"])


def test_a_device_finishes_the_batches_of_a_source_in_an_order_of_its_own(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    data = DataSpec(str(tmp_path / "images"), image_size=SIZE, augment=EVERYTHING, shuffle="none")
    source, plan = open_sources(data, 7)[0], plan_of(Layout(), batch=6, micro_batch=3)
    assert BatchStream(source, 7, plan, 0, torch.device("cuda")).finishing is source
    assert BatchStream(source, 7, plan, 0, torch.device("cpu")).finishing is None


def test_a_mixture_of_images_is_finished_on_a_device_with_the_same_bits(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_images(tmp_path / name)
    parts = tuple(MixSpec(str(tmp_path / name), name) for name in ("one", "two"))
    data = DataSpec("", mix=parts, image_size=SIZE, augment=EVERYTHING, normalise="half", validation_fraction=0.0)
    source, plan = pickle.loads(pickle.dumps(open_sources(data, 7)[0])), plan_of(Layout(), batch=6, micro_batch=3)
    assert BatchStream(source, 7, plan, 0, torch.device("cuda")).finishing is source
    streams = [BatchStream(source, 7, plan, 0, torch.device("cpu")) for _ in "ab"]
    streams[1].finishing = source
    assert streams[1].on_host(12).micro_batches[0].data["pixels"].dtype == torch.uint8
    for one, other in zip(*(stream.at(12).micro_batches for stream in streams), strict=True):
        assert torch.equal(one.data["images"], other.data["images"])
        assert torch.equal(one.data["labels"], other.data["labels"])


@pytest.mark.parametrize("decoding", [1, 5])
def test_threads_change_no_bit(decoding: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that decode, threads that read the same images at once, and squares that are kept by whoever is first."""
    write_images(tmp_path / "images")

    def opened(kept: int) -> Any:
        data = DataSpec(str(tmp_path / "images"), image_size=SIZE, augment=EVERYTHING, normalise="imagenet",
                        images_in_memory=kept * SIDE * SIDE * 3, validation_fraction=0.0, cache_images=kept > 0,
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
        return open_sources(data, 7)[0]

    plan = plan_of(Layout(), batch=6, micro_batch=4)
    alone = BatchStream(opened(0), 7, plan, 0, torch.device("cpu"))
    wanted = [alone.at(6 * step).micro_batches for step in range(8)]
    monkeypatch.setattr(image_source, "THREADS", decoding)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(decoding))
    for _ in range(3):
        stream = BatchStream(opened(5), 7, plan, 0, torch.device("cpu"))
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(stream.at, [6 * (step % 8) for step in range(16)]))
        for step, batch in enumerate(found):
            for one, other in zip(batch.micro_batches, wanted[step % 8], strict=True):
                assert torch.equal(one.data["images"], other.data["images"])
                assert torch.equal(one.data["labels"], other.data["labels"])


def test_decoded_images_are_kept_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images")
    (tmp_path / "images" / "0" / "twin.png").write_bytes((tmp_path / "images" / "1" / "01.png").read_bytes())
    decodes: list[int] = []
    decoded = image_source.decoded

    def watched(content: bytes, entry: Any, size: int) -> np.ndarray:
        decodes.append(size)
        return decoded(content, entry, size)

    monkeypatch.setattr(image_source, "decoded", watched)

    def images(**options: Any) -> torch.Tensor:
        data = DataSpec(str(tmp_path / "images"), validation_fraction=0.0, cache_dir=str(tmp_path / "cache"), **options)
        source = open_sources(data, 7)[0]
        return source.read(np.arange(source.samples))["images"]

    wanted = images(image_size=SIZE)
    decodes.clear()
    first = images(image_size=SIZE, cache_images=True)
    assert 12 <= len(decodes) <= 13, "of 13 images two are of the same bytes; two threads may meet at them"
    decodes.clear()
    assert torch.equal(images(image_size=SIZE, cache_images=True), first) and not decodes and torch.equal(first, wanted)
    images(image_size=SIZE - 1, cache_images=True)
    assert decodes, "of another size they are others"
    (tmp_path / "images" / "0" / "00.png").write_bytes((tmp_path / "images" / "1" / "03.png").read_bytes())
    changed = images(image_size=SIZE, cache_images=True)
    assert not torch.equal(changed, first), "other bytes under the same name are another image"


@pytest.mark.parametrize("kept", [0, 5, 100], ids="{} in memory".format)
def test_squares_in_memory_are_the_same_and_not_decoded_again(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training and held-out images, whose squares are of two sizes; nothing is kept of one that is damaged."""
    write_images(tmp_path / "images")
    (tmp_path / "images" / "0" / "torn.png").write_bytes(b"no image")
    decodes: list[str] = []
    decoded = image_source.decoded

    def watched(content: bytes, entry: Any, size: int) -> np.ndarray:
        decodes.append(entry.name)
        return decoded(content, entry, size)

    monkeypatch.setattr(image_source, "decoded", watched)

    def opened(most_bytes: int) -> list[Any]:
        return list(open_sources(
            DataSpec(str(tmp_path / "images"), image_size=SIZE, validation_fraction=0.4, augment=EVERYTHING,
                     images_in_memory=most_bytes, on_bad="skip"), 7))  # fmt: skip

    def epoch(source: Any, number: int) -> list[torch.Tensor]:
        ids = np.arange(source.samples)
        batch = source.read(ids[::-1].copy(), ids + number * source.samples)
        return [batch["images"], batch["labels"]]

    train, held_out = opened(kept * SIDE * SIDE * 3)
    assert train.samples >= 5 and held_out.samples > 1
    found = [epoch(train, number) for number in range(3)] + [epoch(held_out, 0)]
    first, torn = train.samples, sum(name.endswith("torn.png") for name in decodes[: train.samples])
    room = min(kept, train.samples - torn)
    assert len(decodes) == first + 2 * (first - room) + held_out.samples
    if kept == 100:
        train, held_out = pickle.loads(pickle.dumps((train, held_out)))
        decodes.clear()
        epoch(train, 0)
        assert len(decodes) == first, "another process starts with none"
    plain_train, plain_held_out = opened(0)
    wanted = [epoch(plain_train, number) for number in range(3)] + [epoch(plain_held_out, 0)]
    for mine, his in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, his))


@pytest.mark.parametrize(
    "augment", [AugmentSpec(crop_from=4), AugmentSpec(crop_stretch=2.0)], ids=["from a smaller square", "no room"]
)
def test_crops_that_cannot_be_are_refused(augment: AugmentSpec) -> None:
    with pytest.raises(ConfigError, match=r"task\.data\.augment"):
        check_data(DataSpec("images", image_size=SIZE, augment=augment))
