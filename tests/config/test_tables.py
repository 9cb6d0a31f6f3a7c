"""Lists of tables in a spec file: `[[task.optimizer.groups]]`."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.spec.load import dump_toml, parse_spec, spec_from_dict, spec_schema, spec_to_dict
from paceline.spec.steps.update import GroupSpec

TEXT = """
[task.optimizer]
name = "muon"
arguments = { momentum = 0.9 }

[[task.optimizer.groups]]
match = ["embed*", "*head*"]
name = "adamw"
lr_scale = 0.1

[[task.optimizer.groups]]
match = ["*.bias"]
weight_decay = 0
arguments = { nesterov = false }
"""


def test_a_list_of_tables_becomes_dataclasses_and_back() -> None:
    spec = parse_spec(TEXT)
    assert spec.task.optimizer.groups == (
        GroupSpec(match=("embed*", "*head*"), name="adamw", lr_scale=0.1),
        GroupSpec(match=("*.bias",), weight_decay=0.0, arguments={"nesterov": False}),
    )
    assert spec_from_dict(spec_to_dict(spec)) == spec
    assert parse_spec(dump_toml(spec)) == spec
    again = parse_spec("", overrides=['task.optimizer.groups=[{match=["*.bias"], lr_scale=2}]'])
    assert again.task.optimizer.groups == (GroupSpec(match=("*.bias",), lr_scale=2.0),)
    groups = spec_schema()["properties"]["task"]["properties"]["optimizer"]["properties"]["groups"]
    assert groups["items"]["properties"]["lr_scale"]["minimum"] == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[[task.optimizer.groups]]\nmatsch = ['a']",
            r"spec:2: unknown key 'task.optimizer.groups.1.matsch'[\s\S]*did you mean 'match'",
        ),
        ("[[task.optimizer.groups]]\nmatch = ['a']\nlr_scale = -1", r"spec:3: .*lr_scale = -1 is out of range"),
        ("[task.optimizer]\ngroups = 3", r"spec:2: .*groups = 3 is not a list of tables"),
        ("[task.optimizer]\ngroups = ['a']", "is not a table"),
        ("[task.optimizer]\nname = 'adamv'", r"spec:2: there is no optimizer 'adamv'"),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_spec(text)
