"""`paceline checkpoint`: lists, shows, verifies, compares and converts what real runs have left."""

from __future__ import annotations

import json
import pathlib
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import as_json, in_process, paceline, records_of, write_spec
from safetensors.torch import load_file

from paceline.checkpoint import WholeTensors
from paceline.checkpoint.foreign.distcp import DistributedTensors
from paceline.errors import StorageError
from paceline.supervise.told.typed import typed_command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one task: on one device, and two steps longer on two."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, devices, steps in (("one", 1, 8), ("two", 2, 10)):
        ended = paceline("train", write_spec(folder, folder / name, devices, steps=steps, precision="fp64"))
        assert ended.returncode == 0, ended.stderr
    return folder


def checkpoint(folder: Path, run: str, step: int) -> Path:
    return folder / run / "checkpoints" / f"step-{step:08d}"


def test_a_run_is_listed_newest_first(folder: Path) -> None:
    listed = as_json(in_process("checkpoint", "ls", folder / "two", "--json").stdout)
    assert [one["step"] for one in listed["checkpoints"]] == [10, 8, 4] and listed["skipped"] == []
    assert listed["checkpoints"][0]["ranks"] == 2
    text = in_process("checkpoint", "ls", folder / "one").stdout
    assert text.splitlines()[0].startswith("step-00000008") and "1 rank " in text


def test_the_command_on_record_is_what_was_typed(folder: Path) -> None:
    """A rank's own was: `paceline.launch.worker` and a file that is gone, under "Run it again"."""
    for name in ("one", "two"):
        *words, spec = records_of(folder / name, "run_started")[0]["command"]
        assert words[-2:] == ["paceline", "train"] and Path(spec).is_file()


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/opt/bin/paceline", "train", "a.toml"], ("paceline", "train", "a.toml")),
        (["/opt/site-packages/paceline/__main__.py", "train"], ("python", "-m", "paceline", "train")),
        (["loops/train.py", "--lr", "1"], ("python", "loops/train.py", "--lr", "1")),
        (["/opt/bin/pytest", "-q"], ("/opt/bin/pytest", "-q")), ([""], ()), (["-c"], ()), ([], ()),
        (["/opt/site-packages/ipykernel_launcher.py", "-f", "/tmp/kernel-7.json"], ()),
    ],
)  # fmt: skip
def test_a_command_is_told_as_it_would_be_typed_again(
    argv: list[str], typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert typed_command() == typed


def test_what_a_checkpoint_holds_is_shown(folder: Path) -> None:
    found = as_json(in_process("checkpoint", "show", folder / "one", "--json").stdout)
    assert found["listed"]["step"] == 8 and found["position"] == 8 * 14 and found["task"] == "tiny"
    whole = WholeTensors(checkpoint(folder, "one", 8))
    assert found["bytes_of"]["model"] == sum(tensor.nbytes for tensor in whole.values())
    assert found["tensors"]["model.embed_tokens.weight"] == f"float64{[*whole['embed_tokens.weight'].shape]}"
    text = in_process("checkpoint", "show", folder / "one", "--step", "4", "--tensors").stdout
    assert "step 4 " in text and "model.embed_tokens.weight  float64" in text


def test_every_byte_and_value_is_verified(folder: Path, tmp_path: Path) -> None:
    ended = paceline("checkpoint", "verify", folder / "two")
    assert ended.returncode == 0 and ended.stdout.count("sound ") == 3, ended.stdout + ended.stderr
    damaged = tmp_path / "run" / "checkpoints" / "step-00000010"
    shutil.copytree(checkpoint(folder, "two", 10), damaged)
    shard = next(damaged.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    ended = in_process("checkpoint", "verify", tmp_path / "run")
    assert ended.returncode == 74 and "damaged " in ended.stdout and shard.name in ended.stdout
    told = as_json(in_process("checkpoint", "verify", damaged, "--json").stdout)["checkpoints"]
    assert [one["sound"] for one in told] == [False] and "sha256" in told[0]["because"]


def test_a_value_that_was_written_wrongly_is_found_though_every_digest_fits(folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "step-00000008"
    shutil.copytree(checkpoint(folder, "one", 8), wrong)
    table = wrong / "tensors.json"
    kinds = json.loads(table.read_text())
    kinds["model.embed_tokens.weight"]["fingerprint"] = "0123456789abcdef"
    table.write_text(json.dumps(kinds))
    seal(wrong)
    ended = in_process("checkpoint", "verify", wrong)
    assert ended.returncode == 74 and "the values of 'model.embed_tokens.weight'" in ended.stdout


def seal(path: Path) -> None:
    """Give the manifest of a checkpoint that was changed the digests of its files."""
    import hashlib

    from paceline.checkpoint.untrusted import digest

    document = json.loads((path / "manifest.json").read_text())
    for name, entry in document["body"]["files"].items():
        content = (path / name).read_bytes()
        entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    document["sha256"] = digest(document["body"])
    (path / "manifest.json").write_text(json.dumps(document))


def test_two_checkpoints_are_compared_by_value_whatever_their_layouts(folder: Path) -> None:
    same = in_process("checkpoint", "diff", checkpoint(folder, "one", 4), checkpoint(folder, "one", 4), "--equal")
    assert same.returncode == 0 and " 0 differ" in same.stdout
    older_one = checkpoint(folder, "one", 4)
    steps = as_json(in_process("checkpoint", "diff", folder / "one", older_one, "--prefix", "model.", "--json").stdout)
    newer, older = (WholeTensors(checkpoint(folder, "one", step)) for step in (8, 4))
    for change in steps["tensors"]["changed"]:
        name = change["name"].removeprefix("model.")
        expected = (older[name] - newer[name]).norm() / newer[name].norm()
        assert change["relative"] == pytest.approx(float(expected))
    assert steps["tensors"]["changed"] and not steps["options"]
    layouts = in_process("checkpoint", "diff", folder / "one", folder / "two", "--step", "8", "--equal", "--json")
    found = as_json(layouts.stdout)
    assert layouts.returncode == 4, "two layouts are equal up to rounding, and not bit for bit"
    assert all(change["relative"] < 1e-9 for change in found["tensors"]["changed"])
    assert any(option.startswith("task.stop") and "(notice on resume)" in option for option in found["options"])


def test_torchs_own_loader_reads_what_was_converted_and_back(
    folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    ended = in_process("checkpoint", "convert", folder / "two", tmp_path / "dcp", "--to", "distributed")
    assert ended.returncode == 0 and "warning" in ended.stderr, ended.stderr
    assert not recwarn.list, "torch's, of what is meant to be so"
    whole = WholeTensors(checkpoint(folder, "two", 10), prefix="")
    theirs = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(theirs, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())
    recwarn.clear()
    back = in_process("checkpoint", "convert", tmp_path / "dcp", tmp_path / "back", "--to", "safetensors")
    assert back.returncode == 0 and not recwarn.list, back.stderr
    stored = load_file(tmp_path / "back" / "model.safetensors")
    assert set(stored) == set(whole) and all(torch.equal(stored[name], tensor) for name, tensor in whole.items())
    words = (
        "checkpoint",
        "convert",
        tmp_path / "dcp",
        tmp_path / "weights",
        "--to",
        "safetensors",
        "--prefix",
        "model.",
    )
    chosen = in_process(*words)
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert set(weights) == {name for name in whole if name.startswith("model.")} != set(whole)
    assert f"left out {len(whole) - len(weights)} tensors of other names" in chosen.stdout
    nothing = in_process(*words[:3], tmp_path / "none", *words[4:-1], "net.")
    assert nothing.returncode == 74 and "whose name begins with 'net.'" in nothing.stderr
    refused = in_process(*words[:3], tmp_path / "none", "--to", "weights", "--prefix", "model.")
    assert refused.returncode == 2 and not (tmp_path / "none").exists()


def test_weights_are_those_of_the_export(folder: Path, tmp_path: Path) -> None:
    assert in_process("checkpoint", "convert", folder / "one", tmp_path / "a", "--step", "4").returncode == 0
    assert in_process("export", folder / "one", tmp_path / "b", "--step", "4").returncode == 0
    exported = (tmp_path / "b" / "model.safetensors").read_bytes()
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == exported
    alone = tmp_path / "elsewhere" / "step-00000004.1"  # outside of a run, and of a name that another save has given it
    shutil.copytree(checkpoint(folder, "one", 4), alone)
    assert in_process("checkpoint", "convert", alone, tmp_path / "c").returncode == 0
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == exported
    told = in_process("checkpoint", "convert", alone, tmp_path / "e").stdout
    assert "left out all but weights: the optimizer's state" in told
    refused = in_process("checkpoint", "convert", alone, tmp_path / "d", "--step", "8")
    assert refused.returncode == 2 and "that is one checkpoint" in refused.stderr and not (tmp_path / "d").exists()


@pytest.mark.parametrize("verb", [("checkpoint", "convert"), ("export",)])
def test_a_folder_is_not_called_like_a_file(verb: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """`convert RUN out.pt` made a folder of that name, and torch.load did not open it."""
    for name in ("out.pt", "model.safetensors", "pytorch_model.BIN"):
        refused = in_process(*verb, folder / "one", tmp_path / name)
        assert refused.returncode == 2 and "has the name of a file" in refused.stderr, name
        assert not (tmp_path / name).exists()
    assert in_process(*verb, folder / "one", tmp_path / "llama-3.1").returncode == 0, "a dot is no ending"


class Planted:
    """Runs code where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> object:
        return (Path.touch, (self.proof,))


def test_a_pickle_that_is_no_metadata_runs_nothing(tmp_path: Path) -> None:
    folder, proof = tmp_path / "planted", tmp_path / "ran"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(proof)))
    with pytest.raises(StorageError, match="is refused"):
        DistributedTensors(folder)
    assert not proof.exists()
    ended = paceline("checkpoint", "convert", folder, tmp_path / "out", "--to", "safetensors")
    assert ended.returncode == 74 and not proof.exists() and "Traceback" not in ended.stderr


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # what Python 3.13 alone calls it
def test_metadata_that_another_python_has_saved_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module, pathlib)
        there.setattr(pathlib.PosixPath, "__module__", module)
        dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=tmp_path / "theirs")
    assert module.encode() + b"\x94" in (tmp_path / "theirs" / ".metadata").read_bytes()
    assert torch.equal(DistributedTensors(tmp_path / "theirs")["weight"], torch.arange(6.0))


@pytest.mark.parametrize(
    ("words", "code"),
    [(("ls", "nowhere"), 2), (("diff", "one"), 2), (("show", "one", "--step", "5"), 2), (("look", "one"), 2),
     (("convert", "one", "two"), 2)],
)  # fmt: skip
def test_bad_input_is_told_and_nothing_is_overwritten(folder: Path, words: tuple[str, ...], code: int) -> None:
    action, *others = words
    paths = [folder / word if word in ("one", "two", "nowhere") else word for word in others]
    ended = in_process("checkpoint", action, *paths)
    assert ended.returncode == code and "try" in ended.stderr and "Traceback" not in ended.stderr
    assert (folder / "two" / "checkpoints").is_dir()
