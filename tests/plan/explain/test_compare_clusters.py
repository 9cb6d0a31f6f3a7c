"""One task on several clusters: every row is that cluster's own plan, and the front is among them."""

from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.explain.compare_clusters import cluster_spec, compare_clusters, comparison_rows
from paceline.plan.explain.headline import expected_text
from paceline.plan.planned import plan_task
from paceline.spec.load import Spec, load_spec
from paceline.units import Seconds

TASK = ["task.model=llama-1b", "task.data.seq_len=2048", "task.global_batch=64 samples", "task.stop=20000 steps"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("A paceline is a line of riders who share the work. " * 20000)
    return [*TASK, f"task.data.source={path}", "cluster.device=h100-sxm"]


def spec_with(words: list[str], *more: str) -> Spec:
    return load_spec(None, [*words, *more])


def test_every_row_is_the_plan_of_its_own_cluster(words: list[str]) -> None:
    spec = spec_with(words, "plan.goal={time=1,money=1}")
    found = compare_clusters(spec, ["h100-sxm", "a100-80"], [8, 16])
    assert [(row.device, row.devices) for row in found.rows] == [
        ("h100-sxm", 8), ("h100-sxm", 16), ("a100-80", 8), ("a100-80", 16)
    ]  # fmt: skip
    for row in found.rows:
        alone = plan_task(
            spec_with(
                words, "plan.goal={time=1,money=1}", f"cluster.device={row.device}", f"cluster.devices={row.devices}"
            )
        )
        assert row.planned is not None and row.planned.plan == alone.plan
        stretch = 1 / alone.expected.goodput if found.with_failures else 1
        assert row.usd == pytest.approx(alone.forecast.usd.value * stretch)
        assert row.finish_seconds == pytest.approx(alone.forecast.run_seconds.value * stretch)
    least_time = min(row.finish_seconds for row in found.rows)
    least_usd = min(row.usd for row in found.rows)
    scores = [row.finish_seconds / least_time / 2 + row.usd / least_usd / 2 for row in found.rows]
    assert [row.score for row in found.rows] == pytest.approx(scores)
    assert found.best == scores.index(min(scores)) and found.front == ("time", "money", "energy")
    for row in found.rows:
        mine = (row.finish_seconds, row.usd, row.kwh)
        others = [(other.finish_seconds, other.usd, other.kwh) for other in found.rows]
        beaten = any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others)
        assert row.on_front != beaten


def test_a_cluster_that_has_no_plan_says_why_and_the_others_are_compared(words: list[str]) -> None:
    spec = spec_with(words, "task.model=llama-70b", "task.stop=10 steps")
    found = compare_clusters(spec, [], [8, 12, 64])
    small, uneven, large = found.rows
    assert small.planned is None and "does not fit" in small.because and uneven.planned is None
    assert "nodes of a cluster are alike" in uneven.because and large.planned is not None and found.best == 2
    with pytest.raises(DoesNotFit, match="no plan on any of 2 clusters") as error:
        compare_clusters(spec, [], [1, 8])
    assert error.value.because.count("does not fit") == 2
    with pytest.raises(ConfigError, match="not in the catalog"):
        compare_clusters(spec, ["h100-sxm", "h1000"], [64])


def test_a_goal_that_is_unknown_everywhere_is_an_error(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="carbon, which is unknown"):
        compare_clusters(spec_with(words, "plan.goal=carbon"), [], [8, 16])
    found = compare_clusters(spec_with(words, "plan.goal=carbon", "cluster.region=SE"), [], [8, 16])
    assert "carbon" in found.front


def test_options_of_one_device_hold_for_it_alone(words: list[str]) -> None:
    cluster = spec_with(words, "cluster.price_usd_per_device_hour=9", "cluster.node=p5", "cluster.region=SE").cluster
    other = cluster_spec(cluster, "a100-80", 16)
    assert other.price_usd_per_device_hour is None and other.node == "" and other.region == "SE"
    assert cluster_spec(cluster, "h100-sxm", 16).price_usd_per_device_hour == 9


def test_deadlines_are_kept_with_a_chance_and_failures_count(words: list[str]) -> None:
    failing = ["cluster.devices=8", "cluster.reliability.mtbf_hours_per_device=10"]
    free = plan_task(spec_with(words, *failing))
    assert free.expected.goodput < 0.9
    training, wall = free.forecast.run_seconds.value, free.expected.wall_seconds.value
    between = f"plan.deadline={(training + 0.2 * (wall - training)):.0f} s"
    with pytest.raises(DoesNotFit, match="deadline") as error:
        plan_task(spec_with(words, *failing, between))
    assert "goodput" in error.value.because
    assert plan_task(spec_with(words, *failing, f"plan.deadline={wall * 1.05:.0f} s")).plan
    found = compare_clusters(spec_with(words, *failing, f"plan.deadline={wall * 1.05:.0f} s"), [], [8, 16])
    assert 0.5 < found.rows[0].keeps_deadline < 0.7 < found.rows[1].keeps_deadline


def test_clusters_that_cost_or_emit_nothing_and_runs_that_never_end(words: list[str]) -> None:
    """The first cluster was the best whatever the others took, and a run without a future was a division by zero."""
    clean = spec_with(words, "plan.goal=carbon", "cluster.carbon_g_per_kwh=0")
    found = compare_clusters(clean, ["a100-80", "h100-sxm"], [8])
    assert found.best == 1 and [row.score for row in found.rows] == [1, 1]
    taken = spec_with(words, "cluster.reliability.preemption_hours_per_node=0.01")
    never = compare_clusters(taken, ["a100-80", "h100-sxm"], [8])
    assert all(math.isinf(row.finish_seconds) for row in never.rows)
    assert [row[2] for row in comparison_rows(never)[1:]] == ["never", "never"]
    planned = never.rows[0].planned
    assert planned is not None and "never ends" in expected_text(planned)
    with pytest.raises(DoesNotFit, match="deadline") as error:
        plan_task(dataclasses.replace(taken, plan=dataclasses.replace(taken.plan, deadline=Seconds(1e9))))
    assert "never ends" in error.value.because


def test_the_command_compares_and_draws(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [part for word in words for part in ("--set", word)]
    picture = tmp_path / "clusters.svg"
    table = ["--devices", "8,16", "--device", "h100-sxm,a100-80", "--picture", str(picture)]
    assert main(["plan", *sets, *table]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" x h100-sxm") == 2 and "* best by time" in printed and "front" in printed
    assert all(len(line) <= 100 for line in printed.splitlines()), "plans made lines of 165 columns"
    assert printed.count("micro-batch") == 4 and " unknown " in printed and "carbon unknown" not in printed
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall("{*}circle")) == 5, "four clusters and a ring"
    assert main(["plan", *sets, *table[:4], "--deadline", "10000 d", "--budget", "1e7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 4 and found["rows"][found["best"]]["planned"]["plan"]
    assert all(row["keeps_deadline"] > 0.99 and row["keeps_budget"] > 0.99 for row in found["rows"])
    assert main(["plan", *sets, *table[:4], "--explain"]) == 2
    assert main(["plan", *sets, "--devices", "8", "--deadline", "1 s"]) == 3
    assert main(["plan", *sets, "--devices", "8", "--picture", str(tmp_path / "front.png")]) == 2
    assert main(["plan", *sets, "--devices", "8,x"]) == 2 and main(["plan", *sets, "--device", "a,,b"]) == 2


def test_one_cluster_has_its_front_in_json_and_as_a_picture(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "front.svg"
    sets = [part for word in words for part in ("--set", word)]
    short = ["--devices", "8", "--budget", "1e7", "--picture", str(picture)]
    assert main(["plan", *sets, *short, "--json", "--explain"]) == 0
    found = json.loads(capsys.readouterr().out)
    front = found["pareto"]["plans"]
    assert found["pareto"]["over"] == ["time", "memory", "energy"] and front
    assert [plan["time"] for plan in front] == sorted(plan["time"] for plan in front)
    assert found["contest"]["contenders"][0]["plan"] == found["plan"]
    assert {alternative["choice"] for alternative in found["alternatives"]} >= {"tp", "recompute"}
    assert found["sensitivity"]["steady"] or found["sensitivity"]["switches"]
    drawn = ElementTree.fromstring(picture.read_text())
    styles = [circle.get("class") for circle in drawn.findall("{*}circle")]
    assert styles.count("chosen") == 1 and styles.count("front") <= len(front) and "some" in styles
    assert main(["plan", *sets, *short[:4]]) == 0
    assert "budget $10,000,000: $" in capsys.readouterr().out


def spec_of_h100(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    (tmp_path / "prose.txt").write_text("A paceline is a line of riders who share the work. " * 20000)
    path.write_text(
        'task.model = "llama-1b"\ntask.data.source = "prose.txt"\ntask.data.seq_len = 2048\n'
        'task.global_batch = "64 samples"\ntask.stop = "2000 steps"\n'
        '[cluster]\ndevice = "h100-sxm"\ndevices = 8\nprice_usd_per_device_hour = 77.5\n'
        "figures = { network_bytes_per_second = 1e9 }\n"
    )
    return path


def test_a_price_that_was_stated_beside_another_device_does_not_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(spec_of_h100(tmp_path))
    assert main(["plan", path, "--device", "a100-80", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    price = found["cluster"]["price_usd_per_device_hour"]
    assert price["value"] < 10 and price["note"] != "from the spec"
    (told,) = [remark for remark in found["remarks"] if "price_usd_per_device_hour" in remark]
    assert "spec.toml:9" in told and "'h100-sxm'" in told and "'a100-80'" in told
    assert main(["plan", path, "--device", "a100-80"]) == 0
    assert "77.5" in capsys.readouterr().out, "that it is left out is said without --explain too"
    assert main(["plan", path, "--device", "a100-80,h100-sxm"]) == 0
    assert "cluster.price_usd_per_device_hour" in capsys.readouterr().out


@pytest.mark.parametrize(
    "stated", [(), ("cluster.device=h100-sxm",), ("cluster.device=a100-80", "cluster.price_usd_per_device_hour=77.5")]
)
def test_a_price_stays_for_its_own_device_and_where_it_is_stated_for_the_other(
    tmp_path: Path, stated: tuple[str, ...]
) -> None:
    assert load_spec(spec_of_h100(tmp_path), stated).cluster.price_usd_per_device_hour == 77.5


def test_devices_of_this_machine_keep_what_is_stated_of_them(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text("[cluster]\nprice_usd_per_device_hour = 0.05\n")
    found = load_spec(path, ["cluster.device=cpu"])
    assert (found.cluster.price_usd_per_device_hour, found.remarks) == (0.05, ())
