"""What is remembered of a proof, and what it must depend on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from runs import environment, paceline, records_of, steps_of, write_spec

from paceline.plan.planned import plan_task
from paceline.session.ready.fingerprint import proof_key
from paceline.session.ready.prove import jobs_before_training, prove
from paceline.spec.load import Spec, load_spec, spec_values
from paceline.task import own_code

OBJECTIVE = """
from paceline.task.objective import next_token


def mine(model, batch):
    import helper
    loss, weight = next_token(model, batch)
    return loss * helper.FACTOR, weight
"""


MEANS = """
from paceline.task.objective import next_token


def total(model, batch):
    return next_token(model, batch)


def mean(model, batch):
    loss, weight = next_token(model, batch)
    return loss / weight, 1
"""


def key_of(spec: Spec) -> str | None:
    planned = plan_task(spec)
    return proof_key(planned, jobs_before_training(planned))


def test_a_second_start_takes_the_proof_of_the_first_and_says_so(tmp_path: Path) -> None:
    lines = []
    for name in ("first", "second"):
        spec = write_spec(tmp_path, tmp_path / name, 2, "dp_shard = 2", steps=1)
        done = paceline("train", spec, "--set", "run.verify=true")
        assert done.returncode == 0, done.stderr
        lines.append(next(line for line in done.stdout.splitlines() if line.startswith("verify")))
    proofs = [records_of(tmp_path / name, "verify")[0] for name in ("first", "second")]
    assert [proof["cached"] for proof in proofs] == [False, True] and all(proof["equal"] for proof in proofs)
    assert lines[1].endswith(f"(proved {proofs[0]['proved']}, cached)") and "cached" not in lines[0]
    assert proofs[1]["differences"] == proofs[0]["differences"] and len(steps_of(tmp_path / "second")) == 1


def test_a_proof_is_made_anew_for_whatever_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stated = "dp_shard = 2\nzero = 3\nrecompute = 'none'"  # or what would be chosen here may be one of the others
    path = write_spec(tmp_path, tmp_path / "run", 2, stated)
    base = key_of(load_spec(path))
    assert base and base == key_of(load_spec(path, ["run.keep_last=9"])), "what a run keeps changes no number"
    others = {
        key_of(load_spec(path, [change]))
        for change in (
            "task.seed=8",
            "task.optimizer.eps=1e-6",
            "plan.zero=2",
            "plan.recompute=full",
            "task.model.tied=true",
        )
    }
    monkeypatch.setenv("MKL_CBWR", "AVX2" if os.environ.get("MKL_CBWR") == "COMPATIBLE" else "COMPATIBLE")
    others.add(key_of(load_spec(path)))
    assert base not in others and len(others) == 6


def test_the_users_own_code_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code").mkdir()
    (tmp_path / "own_code" / "losses.py").write_text(OBJECTIVE)
    helper = tmp_path / "helper.py"  # imported inside of a function, never while planning
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    path = write_spec(tmp_path, tmp_path / "run", 2, "dp_shard = 2")
    keys = []
    for factor in ("1", "1", "2"):
        helper.write_text(f"FACTOR = {factor}\n")
        keys.append(key_of(load_spec(path, ["task.objective=own_code.losses:mine"])))
    assert keys[0] and keys[0] == keys[1] != keys[2]
    assert key_of(load_spec(path)) not in keys


@pytest.mark.deep
def test_a_loss_that_is_no_sum_is_named_on_one_device_that_accumulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "means.py").write_text(MEANS)
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = tmp_path / "run"
    path = write_spec(tmp_path, run_dir, 1, "micro_batch = 7", steps=1)
    mean, total = (["task.objective=means:" + name, "run.verify=true"] for name in ("mean", "total"))
    env = environment(PYTHONPATH=os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    done = paceline("train", path, "--set", mean[0], "--set", mean[1], env=env)
    assert done.returncode == 4, done.stderr
    assert "the batch cannot be cut into micro-batches" in done.stderr and "not a sum over rows" in done.stderr
    assert steps_of(run_dir) == []
    found = prove(plan_task(load_spec(path, total)))
    assert found.record and found.record.equal and "however the batch is cut" in found.record.text
    assert prove(plan_task(load_spec(path, [*mean, "plan.micro_batch=14"]))).record is None, "it is not cut"
    assert prove(plan_task(load_spec(path, ["run.verify=true"]))).record is None, "next_token is known to be a sum"


def test_objects_are_proven_every_time(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "run", 2, "dp_shard = 2"))
    planned = plan_task(spec)
    with_object = replace(planned, spec=replace(spec, task=replace(spec.task, objective=lambda model, batch: (0, 1))))
    assert proof_key(with_object, []) is None and proof_key(planned, []) is not None


def test_no_verify_is_a_decision_with_its_origin(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = paceline("train", write_spec(tmp_path, run_dir, 2, "dp_shard = 2", steps=1), "--no-verify")
    assert done.returncode == 0, done.stderr
    (choice,) = [record for record in records_of(run_dir, "decision") if record["what"] == "verify"]
    assert choice["because"] == "run.verify = false (--no-verify)" and records_of(run_dir, "verify") == []
    assert "verify   not proven: run.verify = false (--no-verify)" in done.stdout


@pytest.mark.deep
def test_a_cache_that_cannot_be_written_costs_the_next_proof_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = write_spec(tmp_path, tmp_path / "run", 2, "dp_shard = 2", steps=1)
    env = environment(XDG_CACHE_HOME=os.fspath(tmp_path / "file"))
    done = paceline("train", spec, "--set", "run.verify=true", "--set", "cluster.learn=false", env=env)
    assert done.returncode == 0, done.stderr
    assert "the proof is not remembered" in done.stdout and records_of(tmp_path / "run", "verify")[0]["equal"]


def test_our_own_files_do_not_count_among_a_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof is remembered whatever our package grows to, and not where the user's own code is too much to read."""
    (tmp_path / "own.py").write_text("from paceline.task.objective import next_token as mine\n")
    (tmp_path / "spec.toml").write_text('[task]\nobjective = "own:mine"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(own_code.OURS.parent))
    monkeypatch.setattr(own_code, "MOST_FILES", 6)
    values = [value for key, value in spec_values(load_spec(tmp_path / "spec.toml")) if key.startswith("task.")]
    assert own_code.own_code(values)
    for number in range(5):
        (tmp_path / f"more_{number}.py").write_text("")
    assert own_code.own_code(values) is None
    (tmp_path / "more_1.py").unlink()
    before = own_code.own_code(values)
    assert before and own_code.own_code([*values, "transformers:LlamaForCausalLM"]) not in (None, before), (
        "an installed package has more files than a user may have, and its versions count"
    )
