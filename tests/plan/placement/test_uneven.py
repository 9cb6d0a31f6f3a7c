"""Groups of different devices: resolved, shared out by speed, priced, told, and refused where they cannot run yet."""

import dataclasses
import json

import pytest
from runs import paceline, records_of, steps_of, write_corpus

from paceline.cli.main import main
from paceline.cluster.groups import resolve_groups
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.cost.pricing import price
from paceline.plan.explain.compare_clusters import compare_clusters
from paceline.plan.explain.groups import grouped_lines
from paceline.plan.placement import grouped
from paceline.plan.placement.grouped import plan_groups
from paceline.plan.placement.uneven import Work, plan_uneven
from paceline.plan.planned import plan_task
from paceline.plan.search.search import search
from paceline.plan.search.values import TIE_RATIO, Values, goal_values
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import parse_spec
from paceline.spec.plan import GoalSpec, PlanSpec
from paceline.spec.survive.reliability import ReliabilitySpec
from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
from paceline.task.profile.decoder import profile_decoder
from paceline.units import Seconds

SPEC = """
[task]
model = "llama-11m"
global_batch = "256 samples"
stop = "10 steps"
[task.data]
seq_len = 64
max_bytes = "300 kB"
[cluster]
region = "SE"
[cluster.groups.new]
device = "h100-sxm"
devices = 2
[cluster.groups.old]
device = "t4"
devices = 2
price_usd_per_device_hour = 0.5
[plan]
precision = "fp16"
tp = 1
cp = 1
pp = 1
"""


def model(name="llama-1m"):
    size = NAMED_SIZES[name]
    return profile_decoder(dataclasses.replace(size, vocab=nominal_vocab(size)), 512)


def groups(**kinds):
    spec = ClusterSpec(
        groups={name: {"device": device, "devices": devices} for name, (device, devices) in kinds.items()}
    )
    return resolve_groups(spec)


def work(batch=64, profile=None, **constraints):
    plain = {"precision": "fp16", "tp": 1, "cp": 1, "pp": 1, **constraints}
    return Work(profile or model(), PlanSpec(**plain), batch, 10)


def test_groups_take_what_they_leave_out_from_the_cluster():
    spec = ClusterSpec(region="SE", pue=1.3, spot=True, groups={
        "a": {"device": "h100-pcie", "devices": 16, "figures": {"network_bytes_per_second": 5e9}},
        "b": {"device": "a100-pcie", "devices": 8, "spot": False}})  # fmt: skip
    first, second = resolve_groups(spec)
    assert (first.name, first.cluster.devices, first.cluster.links[1].bytes_per_second.value) == ("a", 16, 5e9)
    assert first.cluster.price_usd_per_device_hour.value == 2.0  # spot, as around it
    assert second.cluster.price_usd_per_device_hour.value == 1.35 and second.cluster.pue.value == 1.3
    assert second.cluster.carbon_g_per_kwh.value == 35.82 and first.remarks[0].startswith("a: ")


WRONG = {
    "one group": ({"a": {"device": "t4", "devices": 1}}, {}, "1 group"),
    "devices beside groups": ({"a": {}, "b": {}}, {"devices": 3}, "beside cluster.groups"),
    "no table": ({"a": 3, "b": 4}, {}, "cluster.groups.a is not a table"),
    "no devices": ({"a": {"device": "t4"}, "b": {}}, {}, "cluster.groups.a lacks devices"),
    "an unknown option": ({"a": {"device": "t4", "devices": 1, "gpus": 1}, "b": {}}, {}, "unknown key 'gpus'"),
    "a wrong type": ({"a": {"device": "t4", "devices": "two"}, "b": {}}, {}, "cluster.groups.a.devices"),
    "an option of the whole": (
        {"a": {"device": "t4", "devices": 1, "pue": 1.2}, "b": {}},
        {},
        "pue is not for a group",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_groups_that_cannot_be_are_told_by_their_place(case):
    tables, around, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        resolve_groups(ClusterSpec(groups=tables, **around))


def test_replicas_share_the_batch_in_proportion_to_their_speed():
    task = work(batch=512, profile=model("llama-350m"))  # of a smaller one the fast group only waits for its host
    ways, _ = plan_uneven(task, groups(fast=("h100-sxm", 4), slow=("t4", 4)))
    way = next(way for way in ways if way.strategy == "replicas")
    fast, slow = way.parts
    assert fast.samples + slow.samples == 512 and fast.samples > 3 * slow.samples
    assert all(part.plan.layout.devices == 4 and part.plan.batch_samples == part.samples for part in way.parts)
    seconds = [part.forecast.step_seconds.value for part in way.parts]
    assert max(seconds) / min(seconds) < 1.25  # they end together, to within rounding
    assert way.step_seconds.value == pytest.approx(max(seconds) + way.joining_seconds)
    alone = search(task.profile, groups(fast=("h100-sxm", 4), slow=("t4", 4))[0].cluster, task.constraints,
                   batch_samples=512, steps=10).best.forecast.step_seconds.value  # fmt: skip
    assert way.step_seconds.value - way.joining_seconds < alone  # the slow group takes something off the fast one


def test_alike_groups_share_evenly_and_bills_add_up():
    ways, _ = plan_uneven(work(batch=64), groups(a=("a100-80", 4), b=("a100-80", 4)))
    for way in ways:
        first, second = way.parts
        if way.strategy == "replicas":
            assert (first.samples, second.samples) == (32, 32)
        hours = way.run_seconds.value / 3600
        money = next(term for term in way.bill if term.name == "money")
        assert money.value == pytest.approx(8 * hours * 1.60)
        assert money.low95 < money.low < money.value < money.high < money.high95
        carbon = next(term for term in way.bill if term.name == "carbon")
        assert carbon.value != carbon.value and carbon.source == "unknown"


def test_stages_split_the_chain_in_proportion_to_speed():
    profile = model("llama-11m")
    ways, _ = plan_uneven(work(batch=64, profile=profile), groups(fast=("h100-sxm", 2), slow=("t4", 2)))
    way = next(way for way in ways if way.strategy == "stages")
    fast, slow = way.parts
    assert fast.blocks + slow.blocks == profile.repeated_blocks and fast.blocks >= slow.blocks >= 1
    assert fast.samples == slow.samples == 64 and way.joining_seconds > 0


def test_a_model_that_no_group_holds_alone_fits_in_stages():
    profile = model("llama-8b")
    both = groups(a=("l40s", 5), b=("a100-40", 4))
    found, refused = plan_uneven(Work(profile, PlanSpec(tp=1, cp=1, pp=1), 8, 10), both)
    assert [way.strategy for way in found] == ["stages"] and refused[0].startswith("replicas: ")
    with pytest.raises(DoesNotFit, match="does not fit these groups"):
        plan_uneven(Work(profile, PlanSpec(tp=1, cp=1, pp=1), 8, 10), groups(a=("t4", 1), b=("t4", 1)))


def test_the_goal_decides_which_way_comes_first():
    both = groups(one=("h100-sxm", 1), many=("h100-sxm", 8))
    task = work(batch=512, profile=model("llama-350m"))

    def ranked(**goal):
        asked = dataclasses.replace(task, constraints=dataclasses.replace(task.constraints, goal=GoalSpec(**goal)))
        ways, _ = plan_uneven(asked, both)
        assert len(ways) == 2
        return ways

    def memory(way):
        return max(part.forecast.peak_bytes.value for part in way.parts)

    fast, lean = ranked(name="time"), ranked(name="memory")
    assert fast[0].step_seconds.value < fast[1].step_seconds.value
    assert memory(lean[0]) < memory(lean[1])
    assert (fast[0].strategy, lean[0].strategy) == ("replicas", "stages")
    assert ranked(memory=0.9, time=0.1)[0].strategy == "stages"  # weights count too


def test_a_batch_smaller_than_the_groups_is_no_replica_plan():
    found, refused = plan_uneven(work(batch=1), groups(a=("a100-80", 1), b=("t4", 1)))
    assert [way.strategy for way in found] == ["stages"] and "1 samples for 2 groups" in refused[0]


def test_groups_are_planned_and_told_with_the_layout_that_trains():
    spec = parse_spec(SPEC)
    found = plan_groups(spec)
    assert {way.strategy for way in found.ways} == {"replicas", "stages"}
    lines = grouped_lines(found, explain=True)
    assert max(map(len, lines)) <= 100 and any("priced only" in line for line in lines)
    assert any("2 x NVIDIA H100" in line for line in lines) and any("joining" in line for line in lines)
    assert any("--explain" in line for line in grouped_lines(found))
    assert found.joint.plan == plan_task(spec).plan and any(line.startswith("trains") for line in lines)


def test_one_layout_over_groups_has_rows_by_speed_and_the_slowest_part_is_its_price():
    planned = plan_task(parse_spec(SPEC.replace("llama-11m", "llama-350m")))
    paces, rows = planned.cluster.paces, planned.plan.rows
    assert len(paces) == 4 and paces[2:] == (1.0, 1.0) and paces[0] == paces[1] < 0.5  # the groups' order is the ranks'
    assert sum(rows) == 256 and max(rows) == rows[0] > 2 * rows[-1]
    assert planned.cluster.device.name == "NVIDIA T4 16GB" and planned.cluster.price_usd_per_device_hour.value > 0.5
    context, step = planned.search.candidates.context, planned.forecast.step_seconds.value
    assert step < price(context, dataclasses.replace(planned.plan, rows=())).step_seconds.value
    slow_have_most = dataclasses.replace(planned.plan, rows=rows[::-1])
    assert 1.1 * step < price(context, slow_have_most).step_seconds.value


def test_one_layout_over_groups_keeps_a_deadline_that_equal_rows_do_not():
    """It was refused: limits were held against equal rows alone."""
    spec = parse_spec(SPEC.replace("llama-11m", "llama-350m"))
    free = plan_task(spec)
    equal = price(free.search.candidates.context, dataclasses.replace(free.plan, rows=())).run_seconds.value
    between = (free.forecast.run_seconds.value + equal) / 2
    asked = dataclasses.replace(spec.plan, deadline=Seconds(between))
    reliability = ReliabilitySpec(failures="none")
    kept = dataclasses.replace(spec, plan=asked, cluster=dataclasses.replace(spec.cluster, reliability=reliability))
    assert plan_task(kept).plan == free.plan
    tight = dataclasses.replace(kept, plan=dataclasses.replace(asked, deadline=Seconds(0.5 * between)))
    with pytest.raises(DoesNotFit, match=r"keeps no .* deadline") as error:
        plan_task(tight)
    assert "cluster.groups" in error.value.try_ and "--devices" not in error.value.try_


def test_what_trains_is_planned_where_nothing_that_is_only_priced_fits(monkeypatch):
    """`plan` refused what `train` ran."""

    def refused(work, groups):
        raise DoesNotFit("this model does not fit these groups", "replicas: too large", "more devices")

    monkeypatch.setattr(grouped, "plan_uneven", refused)
    spec = parse_spec(SPEC)
    shown = plan_groups(spec)
    assert shown.joint is not None and not shown.ways and "too large" in shown.refused[0]
    assert any(line.startswith("trains") for line in grouped_lines(shown))
    limited = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, deadline=Seconds(1e-3)))
    with pytest.raises(DoesNotFit, match="these groups") as error:
        plan_groups(limited)
    assert "too large; one layout over all: " in error.value.because
    with pytest.raises(ConfigError, match="with several clusters"):
        compare_clusters(spec, ["h100-sxm", "t4"], [4])


def test_one_layout_over_groups_serves_the_goal():
    """Of layouts whose rows follow speeds the fastest was taken, whatever the goal."""
    goal = "goal = { memory = 1, time = 0.2 }\n"
    spec = parse_spec(SPEC.replace("llama-11m", "llama-350m").replace("tp = 1\ncp = 1\npp = 1\n", goal))
    chosen = plan_task(spec)
    context, weights = chosen.search.candidates.context, spec.plan.goal.weights
    even = dataclasses.replace(spec.plan, precision="fp16")
    equal = search(context.profile, context.cluster, even, batch_samples=256, steps=10)
    pair = Values.joined(*(found.candidates.values.take([0]) for found in (chosen.search, equal)))
    mine, other = goal_values(pair, weights)
    assert mine <= other * TIE_RATIO


def test_groups_together_keep_the_limits_that_each_keeps_alone():
    both = groups(a=("a100-80", 4), b=("a100-80", 4))
    free, _ = plan_uneven(work(batch=64), both)
    usd = max(part.forecast.usd.value for way in free for part in way.parts)
    with pytest.raises(DoesNotFit, match="does not fit these groups") as error:
        plan_uneven(work(batch=64, budget_usd=1.5 * usd), both)
    assert "the groups together" in error.value.because and "budget" in error.value.because


def test_groups_that_are_alike_have_even_rows_and_the_price_of_one_kind():
    both = parse_spec(SPEC.replace("t4", "h100-sxm").replace("price_usd_per_device_hour = 0.5", ""))
    joint = plan_task(both)
    assert joint.cluster.paces == (1.0,) * 4
    alone = dataclasses.replace(both.cluster, groups={}, device="h100-sxm", devices=4, devices_per_node=2)
    one = plan_task(dataclasses.replace(both, cluster=alone))
    within_a_tie = pytest.approx(one.forecast.step_seconds.value, rel=TIE_RATIO - 1)
    assert joint.forecast.step_seconds.value == within_a_tie


@pytest.mark.parametrize("option", [["--timeline", "step.svg"], ["--picture", "front.svg"], ["--measure"]])
def test_what_speaks_of_one_plan_is_refused_of_groups(option, tmp_path, capsys):
    """All three did nothing, without a word."""
    (tmp_path / "groups.toml").write_text(SPEC)
    assert main(["plan", str(tmp_path / "groups.toml"), *option]) == 2
    said = capsys.readouterr().err
    assert f"{option[0].lstrip('-')} with cluster.groups" in said and "several ways" in said
    assert not list(tmp_path.glob("*.svg"))


def test_a_budget_that_training_on_groups_would_refuse_ends_their_plan_so(tmp_path, capsys):
    """One that nothing of them could keep was planned with 0."""
    (tmp_path / "spec.toml").write_text(SPEC)
    asked = ["plan", str(tmp_path / "spec.toml"), "--set", f"run.dir={tmp_path / 'run'}", "--set"]
    assert main([*asked, "run.budget.device_hours=1000"]) == 0
    assert "budget   1,000 device-hours of" in capsys.readouterr().out
    assert main([*asked, "run.budget.device_hours=1e-9"]) == 3
    told = capsys.readouterr()
    assert "trains   one layout over all groups" in told.out and "is beyond the budget" in told.err


LOCAL = """
[task]
model = { name = "llama-1m", hidden = 64, layers = 2, heads = 4, kv_heads = 2, ffn = 96 }
data = { source = "CORPUS", seq_len = 16, validation_fraction = 0.2, cache_dir = "CACHE" }
global_batch = "14 samples"
stop = "3 steps"
[cluster]
probe = false
[cluster.groups.fast]
device = "cpu"
devices = 1
[cluster.groups.slow]
device = "cpu"
devices = 1
figures = { memory_bytes_per_second = 4e8 }
[run]
dir = "RUN"
record_samples = true
verify = false
"""


def test_the_verb_plans_groups_and_trains_on_those_of_this_machine(tmp_path, capsys):
    (tmp_path / "groups.toml").write_text(SPEC)
    assert main(["plan", str(tmp_path / "groups.toml"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["spec"]["cluster"]["groups"]["old"]["devices"] == 2
    assert sum(part["samples"] for part in said["ways"][0]["parts"]) in (256, 512)
    assert sum(said["joint"]["plan"]["rows"]) == 256
    local = LOCAL.replace("CORPUS", str(write_corpus(tmp_path))).replace("CACHE", str(tmp_path / "cache"))
    (tmp_path / "local.toml").write_text(local.replace("RUN", str(tmp_path / "run")))
    ran = paceline("train", tmp_path / "local.toml")
    assert ran.returncode == 0, ran.stderr
    (started,) = records_of(tmp_path / "run", "run_started")
    fast, slow = started["plan"]["rows"]
    assert fast > slow >= 1 and fast + slow == 14
    assert [len(set(step["sample_ids"])) for step in steps_of(tmp_path / "run")] == [14] * 3
