"""Building models: named sizes, factories, modules, weights, and the errors of each."""

from __future__ import annotations

import gc
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.models.beside import values_beside
from paceline.task.models.build import build_model, fill_weights, has_batch_statistics
from paceline.task.models.decoder import Decoder
from paceline.task.models.huggingface.weights import export_safetensors
from paceline.task.models.init import initial_tensor

FACTORIES = """
import torch
from torch import nn

def build(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.BatchNorm1d(width))

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Parameter(torch.tensor(2.0))

def headed():
    return nn.Sequential(nn.Linear(4, 4), Head())

def fails():
    raise RuntimeError("no such width")

def wrong():
    return nn.Linear

module = nn.Linear(2, 2)
number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "model_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model_factories", raising=False)
    return "model_factories"


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_named_size_has_weights_of_the_seed() -> None:
    spec = ModelSpec(name="llama-1m", layers=1)
    model = build_model(spec, data_vocab=257, seq_len=32, seed=3)
    assert isinstance(model, Decoder)
    weight = model.layers[0].mlp.down_proj.weight
    assert torch.equal(weight, initial_tensor("layers.0.mlp.down_proj.weight", weight.shape, layers=1, seed=3))
    assert same(model, build_model(spec, 257, 32, seed=3))
    assert not same(model, build_model(spec, 257, 32, seed=4))


def test_a_named_size_on_meta_takes_the_same_weights_later() -> None:
    spec = ModelSpec(name="llama-1m", layers=1, tied=False)
    model = build_model(spec, 257, 32, seed=3, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    fill_weights(model, spec, seed=3)
    assert same(model, build_model(spec, 257, 32, seed=3))


def test_a_factory_is_called_with_arguments_under_the_seed(module: str) -> None:
    spec = ModelSpec(name=f"{module}:build", arguments={"width": 6})
    build_model(spec, 0, 0, seed=1)  # imports the module, which draws numbers itself
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    model = build_model(spec, 0, 0, seed=1)
    assert torch.equal(torch.rand(1), expected)
    assert model[0].weight.shape == (6, 6)
    assert same(model, build_model(spec, 0, 0, seed=1))
    assert not same(model, build_model(spec, 0, 0, seed=2))
    assert build_model(spec, 0, 0, seed=1, device="meta")[0].weight.is_meta


class Chosen(nn.Module):
    """What numpy and Python choose as it is made is in no weight and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.from_numpy(np.random.rand(16) < 0.5)
        self.order = random.sample(range(16), 16)


def test_a_factory_draws_the_same_from_numpy_and_python_in_every_process() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, other = build_model(Chosen, 0, 0, 3), build_model(Chosen, 0, 0, 4)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before, "the caller's are left alone"
    random.seed(2)
    np.random.seed(2)
    again = build_model(Chosen, 0, 0, 3)
    assert values_beside(first) == values_beside(again) and again.order == first.order
    assert other.order != first.order and not torch.equal(other.kept, first.kept)


def test_callables_and_modules() -> None:
    model = build_model(lambda: nn.Linear(3, 3), 0, 0, seed=5)
    assert same(model, build_model(lambda: nn.Linear(3, 3), 0, 0, seed=5))
    assert build_model(model, 0, 0, seed=9) is model
    copy = build_model(model, 0, 0, seed=9, device="meta")
    assert copy.weight.is_meta
    assert not model.weight.is_meta


@pytest.mark.parametrize(
    ("attribute", "because"),
    [
        ("fails", "RuntimeError in "),
        ("wrong", "it must return a torch.nn.Module"),
        ("number", "neither a module nor can it be called"),
        ("biuld", "has no 'biuld'"),
    ],
)
def test_factories_that_fail(module: str, attribute: str, because: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_model(ModelSpec(name=f"{module}:{attribute}"), 0, 0, seed=0)
    assert because in refusal.value.because


def test_a_factory_refuses_unknown_arguments_and_overrides(module: str) -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        build_model(ModelSpec(name=f"{module}:build", arguments={"depth": 2}), 0, 0, seed=0)
    with pytest.raises(ConfigError, match=r"model\.hidden cannot change"):
        build_model(ModelSpec(name=f"{module}:build", hidden=8), 0, 0, seed=0)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.model is of type int"):
        build_model(3, 0, 0, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no model 'resnet'"):
        build_model(ModelSpec(name="resnet"), 0, 0, seed=0)


def test_a_named_size_starts_from_weights(tmp_path: Path) -> None:
    spec = ModelSpec(name="llama-1m", layers=1)
    source = build_model(spec, 257, 32, seed=3)
    export_safetensors(source.state_dict(), source.config, tmp_path)
    loaded = build_model(ModelSpec(name="llama-1m", layers=1, weights=str(tmp_path)), 257, 32, seed=8)
    assert same(source, loaded)


def test_a_users_model_starts_from_weights_with_its_buffers(module: str, tmp_path: Path) -> None:
    source = build_model(ModelSpec(name=f"{module}:build"), 0, 0, seed=1)
    source[2].running_mean.fill_(0.5)
    path = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), path)
    loaded = build_model(ModelSpec(name=f"{module}:build", weights=str(path)), 0, 0, seed=2)
    assert same(source, loaded)


def test_a_fresh_head_keeps_the_buffers_and_gets_the_scalars_that_its_class_has(module: str, tmp_path: Path) -> None:
    """Running means were drawn as ones, and a count of batches, or a scale without dimensions, ended in IndexError."""
    source = build_model(ModelSpec(name=f"{module}:headed"), 0, 0, seed=1)
    path = tmp_path / "weights.safetensors"
    save_file({name: value for name, value in source.state_dict().items() if name.startswith("0.")}, path)
    loaded = build_model(ModelSpec(name=f"{module}:headed", weights=str(path), fresh=("1.*",)), 0, 0, seed=2)
    state = loaded.state_dict()
    assert torch.equal(state["0.weight"], source[0].weight)
    assert not state["1.norm.running_mean"].any() and state["1.norm.running_var"].eq(1).all()
    assert int(state["1.norm.num_batches_tracked"]) == 0 and float(state["1.scale"]) == 1.0


def test_weights_without_a_rule_are_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no rule"):
        fill_weights(nn.Linear(2, 2), ModelSpec(name="a:b"), seed=0)


def test_batch_statistics_depend_on_the_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert has_batch_statistics(model)
    assert not has_batch_statistics(model.eval())
    assert not has_batch_statistics(nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2)))
    assert not has_batch_statistics(nn.InstanceNorm1d(2, track_running_stats=True))


def test_libraries_are_imported_while_the_collector_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that remembers the model's trace imported transformers with the collector on: 0.5 to 1 s of CPU more."""
    seen: dict[str, bool] = {}

    class Library(types.ModuleType):
        """A module that imports its parts when they are asked for, as transformers does."""

        def __getattr__(self, name: str) -> object:
            if name not in ("AutoConfig", "OwnForCausalLM"):
                raise AttributeError(name)
            seen[name] = gc.isenabled()
            return Built

    class Built:
        """A class with what is asked of a config's and of a model's."""

        from_pretrained = staticmethod(lambda folder: {})
        _from_config = staticmethod(lambda config: nn.Linear(2, 2))

    monkeypatch.setitem(sys.modules, "transformers", Library("transformers"))
    (tmp_path / "config.json").write_text('{"architectures": ["OwnForCausalLM"], "model_type": "own"}')
    build_model(ModelSpec(f"hf:{tmp_path}", weights="none"), 257, 8, seed=7)
    assert seen == {"OwnForCausalLM": False, "AutoConfig": False} and gc.isenabled()
    (tmp_path / "slow_library.py").write_text(
        "import gc\nfrom torch import nn\nSEEN = gc.isenabled()\nbuild = nn.Identity\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    build_model(ModelSpec("slow_library:build"), 257, 8, seed=7)
    assert not sys.modules["slow_library"].SEEN and gc.isenabled()
