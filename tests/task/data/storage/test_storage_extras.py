"""Storage of S3 and Google: errors name the extra that is not installed; objects of a bucket are read as files are."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from paceline.checkpoint.tiers.remote import RemoteStore
from paceline.errors import MissingExtra
from paceline.session.extras import check_extras
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.remote_out import prepare_remote
from paceline.task.data.source import open_sources
from paceline.task.data.storage.extras import STORAGE_EXTRAS, missing_storage
from paceline.task.data.storage.remote import RemoteFiles

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(("scheme", "package", "extra"), STORAGE_EXTRAS)
def test_the_extra_of_a_kind_of_storage_brings_what_fsspec_asks_for(scheme: str, package: str, extra: str) -> None:
    assert package in known_implementations[scheme]["err"], "fsspec's own words name the package"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {line.partition(">")[0] for line in extras[extra]} == {package, "fsspec"}


@pytest.mark.parametrize(("scheme", "package", "extra"), STORAGE_EXTRAS)
def test_a_storage_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    url = f"{scheme}://bucket/notes"
    checkpoints = CheckpointsSpec(remote=url)

    def told(call: object, *arguments: object) -> str:
        with pytest.raises(MissingExtra) as error:
            call(*arguments)  # type: ignore[operator]
        return str(error.value)

    for call, argument in (
        (RemoteFiles, url),
        (RemoteStore, url),
        (check_extras, RunSpec(checkpoints=checkpoints)),
        (lambda data: open_sources(data, 1), DataSpec(url, seq_len=16, cache_dir=str(tmp_path))),
    ):
        found = told(call, argument)
        assert url in found and f"'{package}'" in found and f"paceline[{extra}]" in found


def test_a_storage_that_is_there_or_not_known_is_missing_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_storage("memory://bucket/a", "a test") is None and missing_storage("hdfs://a/b", "a test") is None
    monkeypatch.setitem(sys.modules, "fsspec", None)
    missing = missing_storage("http://localhost/a", "a test")
    assert missing is not None and "paceline[remote]" in str(missing)


class Bucket(MemoryFileSystem):
    """Objects in memory, told as gcsfs tells those of Google's storage: each write makes another generation."""

    protocol: ClassVar[Any] = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("gs://").removeprefix("gcs://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {**found, "generation": str(found.get("created"))} if found["type"] == "file" else found


def lines(first: int) -> str:
    return "".join(json.dumps({"text": f"document {first + number} " * 9}) + "\n" for number in range(60))


def test_jsonl_and_shards_in_a_bucket_are_the_local_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens from gs:// as from the disk, shards written there and read back, and a changed object noticed."""
    monkeypatch.setitem(_registry, "gs", Bucket)
    (tmp_path / "a.jsonl").write_text(lines(100))
    files = fsspec.filesystem("gs")
    files.pipe("gs://bucket/notes/a.jsonl", lines(100).encode())
    options: dict[str, Any] = {"seq_len": 16, "validation_fraction": 0.1, "cache_dir": str(tmp_path / "cache")}
    local, _ = open_sources(DataSpec(str(tmp_path / "a.jsonl"), **options), 7)
    for url in ("gs://bucket/notes/a.jsonl", "gs://bucket/notes"):
        assert open_sources(DataSpec(url, **options), 7)[0].fingerprint == local.fingerprint
    made = prepare_remote(DataSpec("gs://bucket/notes/a.jsonl", **options), "gs://bucket/out", workers=1)
    assert made.made and files.exists("gs://bucket/out/shards.json")
    shards, _ = open_sources(DataSpec("gs://bucket/out", seq_len=16, cache_dir=str(tmp_path / "blocks")), 7)
    ids = np.arange(local.samples)
    assert shards.samples == local.samples
    assert torch.equal(shards.read(ids)["labels"], local.read(ids)["labels"])
    files.pipe("gs://bucket/notes/a.jsonl", lines(200).encode())  # as long as before
    assert open_sources(DataSpec("gs://bucket/notes/a.jsonl", **options), 7)[0].fingerprint != local.fingerprint
