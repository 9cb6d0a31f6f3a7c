"""The JSON schema is valid, accepts what the loader accepts, and refuses what the loader refuses."""

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.errors import ConfigError
from paceline.spec.load import parse_spec, spec_schema, table

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
SCHEMA = jsonschema.Draft202012Validator(spec_schema())


def accepted_by_loader(text: str) -> bool:
    try:
        parse_spec(text)
    except ConfigError:
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    meta = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    assert not list(meta.iter_errors(spec_schema()))
    assert list(meta.iter_errors({**spec_schema(), "type": "objekt"}))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert EXAMPLES and not list(SCHEMA.iter_errors(tomllib.loads(path.read_text())))


def test_every_option_is_described_and_its_default_is_valid() -> None:
    def at(key: tuple[str, ...]) -> dict[str, Any]:
        schema = spec_schema()
        for part in key:
            tables = [schema, *schema.get("anyOf", ())]
            (schema,) = [found["properties"][part] for found in tables if "properties" in found]
        return schema

    for key, option in table().options():
        schema = at(key)
        assert schema["description"] == option.doc
        if "default" in schema:
            jsonschema.validate(schema["default"], schema)


AMOUNTS = [
    '"300 steps"',
    '"1.5 epochs"',
    '"64 Ki tokens"',
    '"64Ki tokens"',
    '"1 sample"',
    '"3"',
    '"steps"',
    "3",
    '"1 k steps"',
]


@pytest.mark.parametrize(
    "text",
    [*(f"task.stop = {value}" for value in AMOUNTS),
     *(f"task.global_batch = {value}" for value in ('"512 tokens"', '"2 steps"')),
     *(f"run.time_limit = {value}" for value in ('"2 h"', '"1.5d"', '"2 years"', '"none"', "2")),
     *(f"cluster.memory_per_device = {value}" for value in ('"80 GB"', '"24GiB"', '"1 G"', "5", "-5", '"none"')),
     *(f"task.optimizer.lr = {value}" for value in ("1", "1e-3", "0", "-1", '"1"', "true")),
     *(f"task.optimizer.name = {value}" for value in ('"adamw"', '"adam"', "1")),
     *(f"task.model = {value}" for value in ('"x"', "{ hidden = 3 }", "{ hiden = 3 }", "3")),
     *(f"task.model.tied = {value}" for value in ("true", '"none"', '"yes"')),
     *(f"task.data.include = {value}" for value in ('["a"]', '"a"', "[1]", "[]")),
     "task.model.arguments = { a = [1, { b = 2 }] }",
     "task.model.arguments = 3", "plan.zero = 3", "plan.zero = 4", "x = 1"],
)  # fmt: skip
def test_schema_and_loader_agree(text: str) -> None:
    assert SCHEMA.is_valid(tomllib.loads(text)) == accepted_by_loader(text), text
