"""A run corrects the next forecast of its machine; a short measurement of the task does so before any run."""

import json
import math
import time

import pytest
import runs

from paceline.errors import ConfigError, PacelineError
from paceline.plan.explain.explain import explain_lines
from paceline.plan.learn.observe import observe_run, remember_run
from paceline.plan.learn.store import read_observations
from paceline.plan.learn.task_measurement import read_measurements
from paceline.plan.planned import plan_task
from paceline.session.measure import _measurement, measure_task
from paceline.session.measure_device import repeat
from paceline.spec.load import load_spec
from paceline.spec.run_files import runs_under
from paceline.task.profile.plain import task_key


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run in a cache of its own: (environment, spec file, run's directory)."""
    folder = tmp_path_factory.mktemp("learnt")
    environment = runs.environment(XDG_CACHE_HOME=str(folder / "home"))
    spec = runs.write_spec(folder, folder / "run", steps=10)
    done = runs.paceline("train", spec, env=environment)
    assert done.returncode == 0, done.stderr
    return environment, spec, folder / "run"


@pytest.fixture
def here(finished, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", finished[0]["XDG_CACHE_HOME"])
    return finished


def test_a_second_plan_forecasts_what_the_first_run_showed(here):
    _, spec, run_dir = here
    found, _ = observe_run(run_dir)
    unlearnt = plan_task(load_spec(spec, ["cluster.learn=false"]))
    learnt = plan_task(load_spec(spec))
    assert unlearnt.learnt is None and len(learnt.learnt.runs) == 1
    assert learnt.learnt.runs[0].observation == read_observations(found.machine)[0] == found

    def error(planned, measured, forecast):
        return abs(math.log(measured / getattr(planned.forecast, forecast).value))

    # However busy the machine was: the forecast is on the way from the formulas' to what was measured.
    assert error(learnt, found.step_seconds, "step_seconds") < error(unlearnt, found.step_seconds, "step_seconds")
    assert error(learnt, found.peak_bytes, "peak_bytes") < 0.5 * error(unlearnt, found.peak_bytes, "peak_bytes")
    whole = " ".join(" ".join(explain_lines(learnt)).split())
    assert "learnt from 1 run here" in whole and "this task" in whole
    assert "learnt from no run: cluster.learn = false" in explain_lines(unlearnt)


def test_an_observation_is_of_steady_steps_under_the_last_plan(here):
    found, cluster = observe_run(here[2])
    steps = [step for step in runs.steps_of(here[2]) if step["step"] not in (1, 4, 8, 10)]  # first, checkpoints
    assert found.steps == len(steps) == 6 and found.devices == cluster.devices == 1
    ordered = sorted(step["seconds"]["total"] for step in steps)
    assert found.step_seconds == pytest.approx((ordered[2] + ordered[3]) / 2)
    assert found.peak_bytes >= max(step["peak_bytes"] for step in steps)
    assert 0 < found.core_share <= 1.001
    assert sum(found.forecast.values()) == pytest.approx(
        runs.records_of(here[2], "run_started")[0]["forecast"]["step_seconds"]["value"]
    )


def test_plan_json_tells_the_runs_and_forget_deletes_them(here, tmp_path):
    environment, spec, run_dir = here
    told = runs.as_json(runs.paceline("plan", spec, "--json", env=environment).stdout)["learnt"]
    assert [one["run"] for one in told["runs"]] == [str(run_dir)] and told["runs"][0]["noise"] >= 0.03
    forgot = runs.as_json(runs.paceline("probe", "--forget", "--json", env=environment).stdout)
    assert forgot["runs"] == 1
    assert runs.as_json(runs.paceline("plan", spec, "--json", env=environment).stdout)["learnt"] is None
    remember_run(run_dir)  # from the journal alone


def test_runs_are_backtested_by_their_folder(here, tmp_path):
    environment, _, run_dir = here
    (tmp_path / "none" / "journal").mkdir(parents=True)
    rows = tmp_path / "rows.csv"
    done = runs.paceline("backtest", run_dir, tmp_path, "--rows", rows, "--json", env=environment)
    own, empty = runs.as_json(done.stdout)["files"]
    assert own["kind"] == "own runs" and own["scored"] == 1 and own["memory"]["n"] == 1
    assert empty["scored"] == 0 and list(empty["not_scored"]) == ["its journal has no start"]
    assert len(rows.read_text().splitlines()) == 3
    assert runs_under(run_dir.parent) == [run_dir]
    nothing = runs.paceline("backtest", rows.parent / "none" / "journal", env=environment)
    assert nothing.returncode == 5 and "there is no run under" in nothing.stderr


def test_the_tasks_own_blocks_are_measured_and_used(here):
    _, spec, _ = here
    planned = plan_task(load_spec(spec))
    said = []
    # Where so small a pass took less than its blocks by themselves, the machine was busy: it is measured again.
    for _ in range(6):
        found = measure_task(planned, said.append, seconds=0.1)
        if found.rest_seconds > 0:
            break
    assert found.blocks == 2 and len(found.block_seconds) == 1 and found.update_parameters == planned.profile.parameters
    # 6 operations per parameter and token (Kaplan et al. 2020, section 2.1), at a rate that a CPU can have.
    (block,) = {b.parameters for b in planned.profile.blocks if b.recomputable}
    tokens = planned.plan.micro_batch * planned.profile.tokens_per_sample
    beside = planned.profile.parameters - 2 * block
    assert 1e6 < 6 * block * tokens / found.block_seconds[0] < 1e13
    assert found.rest_seconds > 0 and 1e6 < 6 * beside * tokens / found.rest_seconds < 1e13
    assert read_measurements(task_key(planned.profile, "adamw"), planned.cluster) == {"fp32": found}
    again = plan_task(load_spec(spec))
    terms = {term.name: term for term in again.forecast.time}
    assert "measured here" in terms["products, forward"].formula and terms["products, forward"].source == "measured"
    assert any("a block" in line for line in said)
    assert any("measured 20" in line for line in explain_lines(again))
    untouched = plan_task(load_spec(spec, ["cluster.learn=false"]))
    assert "measured here" not in untouched.forecast.time[0].formula


def test_what_blocks_do_not_explain_of_a_pass_is_the_rest(here):
    planned = plan_task(load_spec(here[1]))
    timed = {"update_seconds": 0.5, "parameters": 7, "blocks": 2, "repeats": 5, "spread": 0.1, "block_seconds": [2.0],
             "tokens": 0.5, "pairs": 0.25}  # fmt: skip
    of = {whole: _measurement(planned, planned.profile, {**timed, "whole_seconds": whole}) for whole in (7.0, 3.9)}
    assert of[7.0].rest_seconds == 7.0 - 2 * 2.0 and of[7.0].block_seconds == (2.0,)
    assert (of[7.0].tokens, of[7.0].pairs) == (0.5, 0.25)
    assert of[3.9].rest_seconds == 0  # two blocks alone took longer than the pass with both


def test_calls_that_are_timed_take_turns():
    class Alone:
        maximum = staticmethod(list)

    order, waits = [], []

    def run_pass():
        order.append("pass")

    def run_block():
        order.append("block")
        time.sleep(0.01)

    taken = repeat([run_pass, run_block], lambda: waits.append(len(order)), 0.0, Alone)
    assert order == ["pass", "block"] * 6 and waits == list(range(1, 13))  # a first round, and five that count
    assert len(taken[0]) == len(taken[1]) == 5 and min(taken[1]) >= 0.01


def test_a_measurement_that_takes_too_long_is_killed(here):
    planned = plan_task(load_spec(here[1]))
    with pytest.raises(PacelineError, match=r"could not be measured") as error:
        measure_task(planned, lambda line: None, limit_seconds=0.0)
    assert "had to be killed" in error.value.because


def test_only_this_machine_can_be_measured(here):
    planned = plan_task(load_spec(here[1], ["cluster.device=h100-sxm"]))
    with pytest.raises(ConfigError, match="only this machine"):
        measure_task(planned, lambda line: None)


def test_a_journal_without_enough_steps_says_so(here, tmp_path):
    journal = tmp_path / "journal"
    journal.mkdir()
    lines = (here[2] / "journal" / "0001.jsonl").read_text().splitlines()
    start = [line for line in lines if json.loads(line)["kind"] == "run_started"]
    (journal / "0001.jsonl").write_text("\n".join(start + [line for line in lines if '"step":2' in line]) + "\n")
    with pytest.raises(PacelineError, match="tells no step time"):
        observe_run(tmp_path)


def test_a_copy_for_saves_is_in_a_peak_where_a_save_was_beside_training_and_steps_followed(here, tmp_path):
    """A run that was stopped before its first save, or whose host had no room for the copy, had counted it too."""
    assert observe_run(here[2])[0].staged
    lines = list(map(json.loads, (here[2] / "journal" / "0001.jsonl").read_text().splitlines()))
    waited = [line | {"stall_seconds": line["seconds"]} if line["kind"] == "checkpoint" else line for line in lines]
    stopped = [line for line in lines if line["kind"] != "checkpoint" or line["step"] == 10]
    for name, told in (("waited", waited), ("stopped", stopped)):
        (tmp_path / name / "journal").mkdir(parents=True)
        (tmp_path / name / "journal" / "0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
        assert not observe_run(tmp_path / name)[0].staged
