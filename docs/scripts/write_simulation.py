"""Writes docs/simulated-runs.md and its pictures: published runs simulated, and pipelines drawn.

`python docs/scripts/write_simulation.py` writes them in seconds, from seeds; a test compares them with what the code
says now. Nothing here rests on a forecast: jobs are given by their devices and days.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.plan.schedules.draw import timelines_svg
from paceline.plan.schedules.timeline import StageTimes, Timeline, pipeline_timeline
from paceline.simulate.defaults import POLICIES, Saving, make_policy, saving_of
from paceline.simulate.draw import intervals_svg
from paceline.simulate.failures import STUDIES
from paceline.simulate.outcome import NodeCosts
from paceline.simulate.policy import duration_text
from paceline.simulate.scenario import Scenario
from paceline.simulate.sweep import IntervalSweep, PolicyResult, simulate_policy, sweep_intervals
from paceline.spec.survive.reliability import ReliabilitySpec
from paceline.units import Seconds

DOCS = Path(__file__).parents[1]
DAY, RUNS, SEED = 86400.0, 20, 0
PARAMETERS = 405_853_388_800  # of Llama 3.1 405B
LLAMA3 = Scenario(2048, 8, 54 * DAY, STUDIES["llama3"], replicas=128, micro_batches=2048, horizon_seconds=54 * DAY)
STEP_SECONDS = 6.0
COMING_BACK = ((60, 60), (150, 150), (300, 300), (450, 450), (600, 600), (600, 900))  # detection, restart
BLOCKING = make_policy("blocking", LLAMA3, Saving(0.0, 120.0, 0.0), ReliabilitySpec(), STEP_SECONDS)

HEAD = """<!-- Written by docs/scripts/write_simulation.py; run it again instead of editing. -->

# Simulated runs

What published failure rates lead to, simulated by the engine of `paceline simulate`: {runs} runs each, seed {seed}.
How it works and what it leaves out stands in the [guide](guide/plan/simulating.md).
"""


def simulated(scenario: Scenario, name: str, reliability: ReliabilitySpec) -> PolicyResult:
    """Return the runs of a built-in policy, with checkpoints of Llama 3.1 405B."""
    saving = saving_of(PARAMETERS, "adamw", scenario.nodes, scenario.devices, reliability)
    policy = make_policy(name, scenario, saving, reliability, STEP_SECONDS)
    return simulate_policy(scenario, policy, RUNS, SEED, NodeCosts())


def sweep() -> IntervalSweep:
    """Return goodput over intervals, for checkpoints that halt training for two minutes."""
    return sweep_intervals(LLAMA3, BLOCKING, RUNS, SEED)


def timelines() -> list[Timeline]:
    """Return the four schedules with 4 devices, 8 micro-batches, and passes that are equally long."""
    virtual = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
    return [
        pipeline_timeline(name, 4, 8, [StageTimes(*[1e-3 / count] * 3)] * (4 * count))
        for name, count in virtual.items()
    ]


def page() -> str:
    """Return the page."""
    sections = (_studies(), _llama3(), _policies(), _intervals(), _pipelines())
    return HEAD.format(runs=RUNS, seed=SEED) + "".join("\n" + "\n".join(lines) + "\n" for lines in sections)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> list[str]:
    """Return a table in Markdown, numbers to the right; `words` are the columns without numbers."""
    lines = [head, ["---" if column in words else "---:" for column in range(len(head))], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _studies() -> list[str]:
    rows = []
    for name, rates in STUDIES.items():
        hours = rates.mtbf_hours_per_device
        scales = [f"{hours / devices:,.3g} h" for devices in (1024, 16384, 131072)]
        rows.append([f"`{name}`", f"{hours:,.0f} h", *scales, rates.text])
    head = ("study", "one device", "1,024 devices", "16,384", "131,072", "what was published")
    return ["## Mean time between unexpected interruptions", "", *_table(head, rows, (0, 5))]


def _llama3() -> list[str]:
    rows = []
    for detection, restart in COMING_BACK:
        result = simulated(LLAMA3, "spares", ReliabilitySpec(detection=Seconds(detection), restart=Seconds(restart)))
        goodput = result.summary.goodput
        lost = result.summary.lost_seconds.mean / result.summary.interruptions.mean
        rows.append([
            f"{duration_text(detection)} + {duration_text(restart)}", f"{result.summary.interruptions.mean:.0f}",
            f"{lost / 60:.1f} min", f"{goodput.p10:.1%} to {goodput.p90:.1%}", f"{goodput.mean:.1%}",
        ])  # fmt: skip
    text = """
Dubey et al. 2024 ([arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4) report 419 unexpected and 47
planned interruptions in 54 days on 16,384 H100, and more than 90 % effective training time; not how long an
interruption took, nor how often they saved. 90 % of 54 days leaves 16.7 minutes for each of the 466. Simulated with
their rates, asynchronous checkpoints at Daly's interval and spare nodes:"""
    after = """
So what they report is reached where detecting and restarting take about 15 minutes together, or less. MegaScale's
bounds, 10 minutes to detect and 15 to be back (Jiang et al. 2024,
[arXiv:2402.15627](https://arxiv.org/abs/2402.15627)), would be too slow at this rate of failures."""
    head = ("detection + restart", "interruptions", "work lost at each", "goodput, 10th to 90th percentile", "mean")
    return ["## Llama 3 405B, 54 days on 16,384 H100", *text.split("\n"), "", *_table(head, rows), *after.split("\n")]


def _policies() -> list[str]:
    rows, shown = [], ("lost work", "checkpoints", "fewer devices", "waiting for nodes")
    for name, what in POLICIES.items():
        result = simulated(LLAMA3, name, ReliabilitySpec())
        seconds, wall = result.summary.seconds, result.summary.wall_seconds.mean
        back = sum(seconds[kind] for kind in ("detection", "restart", "restore")) / wall
        rows.append([
            f"`{name}`", what, f"{result.policy.spares}", f"{result.summary.goodput.mean:.1%}",
            *(f"{seconds[kind] / wall:.1%}" for kind in shown), f"{back:.1%}",
        ])  # fmt: skip
    text = """
The same failures, detection and restart 5 minutes each, repairs of a day in the mean, a copy of the model on 128
devices. Columns from the fifth on are parts of wall time."""
    head = ("policy", "what it does", "spare nodes", "goodput", *shown, "coming back")
    return ["## Policies", *text.split("\n"), "", *_table(head, rows, (0, 1))]


def _intervals() -> list[str]:
    found, rows = sweep(), []
    for point in found.points:
        shares = (point.goodput, point.standard_error, point.expected_goodput)
        rows.append([duration_text(point.every), *(f"{share:.2%}" for share in shares)])
    text = f"""
Checkpoints that halt training for {duration_text(BLOCKING.stall)}, on the same 16,384 devices: Young's interval is
{duration_text(found.young)}, Daly's {duration_text(found.daly)}, and the best of those simulated
{duration_text(found.simulated)}. Daly's formula knows neither planned stops nor waiting for nodes.

![Goodput over the interval between checkpoints](images/simulate-intervals.svg)
"""
    head = ("work between checkpoints", "goodput", "standard error", "Daly's formula")
    return ["## The best interval", *text.split("\n"), *_table(head, rows)]


def _pipelines() -> list[str]:
    rows = [[timeline.schedule, f"{timeline.bubble:.1%}"] for timeline in timelines()]
    text = """
One step on 4 devices with 8 micro-batches; forward, backward for inputs and backward for weights take equally long.
Bubbles are idle over busy time: (p - 1) / m for GPipe and 1F1B, a half of that with two stages a device, a third where
zero-bubble fills it with weights' gradients.

![Four schedules of a pipeline](images/pipelines.svg)
"""
    return ["## Pipelines", *text.split("\n"), *_table(("schedule", "bubble"), rows)]


def files() -> dict[Path, str]:
    """Return path to content of everything that is written."""
    return {
        DOCS / "simulated-runs.md": page(),
        DOCS / "images" / "simulate-intervals.svg": intervals_svg(sweep()),
        DOCS / "images" / "pipelines.svg": timelines_svg(timelines()),
    }


def main() -> None:
    """Write the page and its pictures."""
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
