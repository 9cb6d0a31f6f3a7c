"""What a model's name and its weights lack is told with the whole value to write, and before the data are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.plan.prepare import prepare_task
from paceline.spec.load import parse_spec
from paceline.task.models.huggingface.transfer import fit


class Held:
    """Tensors of files, by name."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = {name.replace("__", "."): shape for name, shape in shapes.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]


@pytest.mark.parametrize("name", ["llama-7b", "./nowhere", "hf:./nowhere"])
def test_a_model_that_is_not_there_is_told_before_the_data_are_read(name: str, tmp_path: Path) -> None:
    """Tokenising a large corpus takes hours."""
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    said: list[str] = []
    spec = parse_spec(f'[task]\nmodel = "{name}"\ndata = {{ source = "{text}", cache_dir = "{tmp_path / "cache"}" }}')
    with pytest.raises(ConfigError, match="there is no model"):
        prepare_task(spec, say=said.append)
    assert not said and not (tmp_path / "cache").exists()


def test_what_is_drawn_instead_of_read_is_told_whole_and_once() -> None:
    """A head has parts of parts, and what the task draws already must stay in the list that is copied."""
    held = Held(body__weight=(2, 2), cls__bias=(3,), cls__transform__weight=(2, 2), cls__transform__norm__weight=(2,))
    wanted = {"body.weight": (2, 2), "score.weight": (4, 2)}
    with pytest.raises(ConfigError) as refused:
        fit(wanted, held, [], "weights", fresh=["score.*"])  # type: ignore[arg-type]
    assert 'task.model.fresh = ["score.*", "cls.*"], which' in refused.value.try_
