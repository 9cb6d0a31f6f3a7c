"""What a source names is listed once while a run is planned and begins, and anew whenever files may have changed."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import in_process

from paceline.plan import prepare
from paceline.session import start
from paceline.spec.load import load_spec
from paceline.spec.task import DataSpec
from paceline.task.data.listed_once import list_anew, listed, listed_once
from paceline.task.data.sources import files
from paceline.task.data.sources.images import listing as images
from paceline.task.data.sources.listing import File
from paceline.task.data.sources.tables import store
from paceline.task.profile import traced

SPEC = """
[task]
name = "once"
model = {model}
data = {{ source = "{source}", seq_len = 16, image_size = 8, cache_dir = "{cache}" }}
{more}
optimizer = {{ lr = 1e-3 }}
global_batch = "8 samples"
stop = "2 steps"

[cluster]
device = "cpu"
devices = 1
probe = false

[run]
dir = "{run}"
verify = false
"""
DECODER = '{ name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }'
PICTURES = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 2))
"""


def spec_of(folder: Path, model: str, source: Path, more: str = "") -> Path:
    path = folder / "once.toml"
    path.write_text(SPEC.format(model=model, source=source, cache=folder / "cache", run=folder / "run", more=more))
    return path


def write_table(folder: Path) -> Path:
    folder.mkdir()
    for name, rows in (("train", 40), ("validation", 12)):
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            texts = [(f"no {at} is {('dull', 'fine')[at % 2]}", ("bad", "good")[at % 2]) for at in range(rows)]
            csv.writer(stream).writerows([("text", "label"), *texts])
    return folder


def write_images(folder: Path, count: int) -> Path:
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(count)
    for number in range(count):
        path = folder / ("cat", "dog")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often which folder is walked through."""
    counts: Counter[str] = Counter()
    walk = files.walk_files

    def counting(root: Path, *given: Any) -> Any:
        counts[Path(root).name] += 1
        return walk(root, *given)

    for module in (files, images):
        monkeypatch.setattr(module, "walk_files", counting)
    return counts


def test_a_table_is_listed_surveyed_and_written_once_and_its_model_traced_once(
    tmp_path: Path, walked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: counts.update([name]) or real(*args, **kwargs))

    counted(store, "survey_table")
    counted(store, "write_table")
    counted(traced, "profile_module")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    spec = spec_of(tmp_path, DECODER, write_table(tmp_path / "reviews"))
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    assert walked == {"reviews": 1}
    assert counts == {"survey_table": 1, "write_table": 1, "profile_module": 1}
    # The next start finds the table, and looks once whether the files are what they were.
    assert in_process("train", spec, "--set", "task.stop=4 steps").returncode == 0
    assert walked == {"reviews": 2}
    assert (counts["survey_table"], counts["write_table"]) == (1, 1)


def test_folders_of_images_are_listed_once_each(
    tmp_path: Path, walked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    monkeypatch.syspath_prepend(tmp_path)
    kept = write_images(tmp_path / "kept", 8)
    more = f'objective = "classification"\nevaluate = {{ sets = [{{ name = "kept", source = "{kept}" }}] }}'
    spec = spec_of(tmp_path, '"pictures:net"', write_images(tmp_path / "shown", 24), more)
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    assert walked == {"shown": 1, "kept": 1}


ROWS = """
import torch
from paceline.task.data.listed_once import listed

READ, LOOKED = [], []

class Rows:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        READ.append(index)
        listed("own", lambda: LOOKED.append(index))
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 2
"""


def test_a_run_that_has_opened_its_data_lists_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device it trains within the block of its start, perhaps for days."""
    for name, content in (("pictures_read", PICTURES), ("rows_read", ROWS)):
        (tmp_path / f"{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    spec = spec_of(tmp_path, '"pictures_read:net"', Path("rows_read:Rows"), 'objective = "classification"')
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    own = sys.modules["rows_read"]
    assert len(own.LOOKED) > 2 * 8, "each row of both steps"
    assert len(own.LOOKED) < len(own.READ), "and what is read while it is planned once"


def test_a_file_that_comes_between_two_plans_is_seen_by_the_second(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "shown", 8)
    with listed_once():
        first = images.list_images(str(folder), None)  # type: ignore[arg-type]
        write_images(folder, 10)
        assert images.list_images(str(folder), None) is first  # type: ignore[arg-type]
        list_anew()
        assert len(images.list_images(str(folder), None).entries) == 10  # type: ignore[arg-type]
        write_images(folder, 12)
        assert len(images.list_images(str(folder), None).entries) == 12  # type: ignore[arg-type]
    assert len(first.entries) == 8


def test_within_a_block_each_is_looked_for_once_and_what_fails_again() -> None:
    looks: list[str] = []

    def look(name: str) -> str:
        looks.append(name)
        if name == "gone":
            raise OSError(name)
        return name

    for _ in range(2):
        listed("a", lambda: look("a"))
    with listed_once():
        with listed_once():
            listed("a", lambda: look("a"))
        listed("a", lambda: look("a"))  # the outer block still holds it
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                listed("gone", lambda: look("gone"))
    listed("a", lambda: look("a"))
    assert looks == ["a", "a", "a", "gone", "gone", "a"]


def test_files_of_a_folder_are_not_compared_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten thousand texts that would be fifty million comparisons."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03}.txt").write_text("a text")
        (folder / f"{number:03}.dat").write_text("of another kind")
        (folder / f"{number:03}.csv").write_text("text,label\na,b\n")
    compared: list[object] = []
    same = File.__eq__
    monkeypatch.setattr(File, "__eq__", lambda one, other: compared.append(other) or same(one, other))
    found = files.list_files(DataSpec(source=str(folder)))
    assert len(found.files) == 60 and sum(each.count for each in found.skipped) == 120
    assert len(store.list_table(DataSpec(source=str(folder))).files) == 60
    assert len(compared) <= 180


def test_a_run_that_measures_the_machine_first_prepares_its_task_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is planned twice, on assumed figures and on those of the probe, and data and model are the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    prepared: list[object] = []
    real = prepare._prepared
    monkeypatch.setattr(prepare, "_prepared", lambda *given: prepared.append(given) or real(*given))
    probed: list[int] = []

    def measure(devices: int, kind: str, **_: Any) -> None:
        probed.append(devices)

    monkeypatch.setattr(start, "probe_machine", measure)
    monkeypatch.setattr(start, "SHORT_RUN", 0.0)
    spec = load_spec(spec_of(tmp_path, DECODER, write_table(tmp_path / "reviews")), ["cluster.probe=true"])
    planned = start.plan_here(spec, lambda line: None)
    assert probed == [1] and len(prepared) == 1
    assert planned.plan == start.plan_task(spec).plan
