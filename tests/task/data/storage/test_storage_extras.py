"""Storage whose package is not installed: an error names the extra, before anything is asked for or started."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

from paceline.checkpoint.tiers.remote import RemoteStore
from paceline.errors import STORAGE_EXTRAS, MissingExtra, missing_storage
from paceline.session.extras import check_extras
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources
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
