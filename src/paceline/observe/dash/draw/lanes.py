"""A lane for each rank that was the slowest, over the run's checks of all ranks; nodes as a table of their samples."""

from __future__ import annotations

from paceline import svg
from paceline.history.records import number, table, text
from paceline.observe.live.run import LiveRun, slowest_of
from paceline.report.charts import LEFT, RIGHT, WIDTH
from paceline.report.drawn.markup import esc, note_html, pill, table_html
from paceline.report.scale import scale_for, ticks_of
from paceline.spec.journal.kinds import RanksRecord
from paceline.spec.journal.watching import NodeSample
from paceline.units import format_bytes, format_rate

LANES, ROW, TOP, SHOWN_NODES = 12, 20, 8, 32
HEAT = (1.02, 1.05, 1.1, 1.2, 1.5)  # times the median at which a lane's colour deepens
APART = 1.2  # times the median: a rank beyond it is said to be slow


def lanes_svg(run: LiveRun) -> str:
    """Return the lanes; nothing where no record is of several ranks."""
    seen = [(each, found) for each in run.of(RanksRecord) if (each.ranks or 1) > 1 and (found := slowest_of(each))]
    if not seen:
        return ""
    ranks = [rank for rank, _ in run.slowest.most_common(LANES)]
    steps = [float(each.step or 0) for each, _ in seen]
    x = scale_for(steps, LEFT + 30, WIDTH - RIGHT, pad=0.0)
    height = TOP + ROW * len(ranks) + 42
    bottom = float(TOP + ROW * len(ranks))
    worst = _worst(run)
    parts = []
    for tick in (tick for tick in ticks_of(x, 8) if tick == round(tick)):
        parts.append(svg.text(x(tick), bottom + 16, f"{tick:,.0f}", "tick", "middle"))
    parts.append(svg.text((x.start + x.end) / 2, bottom + 33, "step", "label", "middle"))
    for index, rank in enumerate(ranks):
        top = float(TOP + ROW * index)
        style = "end" if worst and worst[0] == rank else "label"
        parts.append(svg.text(LEFT + 22, top + 13, f"rank {rank}", style, "end"))
        parts.append(svg.box(x.start, top + 2, x.end - x.start, 14.0, "lane"))
        parts.append(svg.text(x.end + 8, top + 13, f"{run.slowest[rank]:,} times slowest", "tick"))
    places = {rank: float(TOP + ROW * index) for index, rank in enumerate(ranks)}
    width = max(2.0, (x.end - x.start) / max(20, len(seen)))
    for record, (rank, times) in seen:
        if rank in places:
            heat = sum(times >= limit for limit in HEAT)
            words = f"step {record.step}: rank {rank}, {times:.2f} times the median of {record.ranks} ranks"
            left = max(x.start, min(x.end - width, x(float(record.step or 0)) - width / 2))
            parts.append(svg.box(left, places[rank] + 2, width, 14.0, f"heat h{heat}", words))
    label = f"Which rank was the slowest, over steps. {worst_words(run)}"
    return svg.picture(WIDTH, height, label, parts, name="chart", alone=False)


def _worst(run: LiveRun) -> tuple[int, float] | None:
    newest = run.newest(RanksRecord)
    return slowest_of(newest) if newest is not None and (newest.ranks or 1) > 1 else None


def worst_words(run: LiveRun) -> str:
    """Return which rank is the slowest now, and by how much; nothing where ranks were not compared."""
    found = _worst(run)
    if found is None:
        return ""
    rank, times = found
    apart = "apart from the others" if times > APART else "not apart from the others"
    return f"Slowest now: rank {rank}, {times:.2f} times the median, {apart}."


def nodes_html(run: LiveRun) -> str:
    """Return the newest sample of each node: flagged ones first, then by name, at most SHOWN_NODES of them."""
    if not run.nodes:
        return ""
    ordered = sorted(run.nodes.items(), key=lambda pair: (not pair[1].flagged, pair[0]))
    signals = sorted({name for _, sample in ordered for name in sample.signals})
    hosts = sorted({name for _, sample in ordered for name in sample.host})
    rows = []
    for name, sample in ordered[:SHOWN_NODES]:
        flagged = pill("warn", ", ".join(sample.flagged)) if sample.flagged else ""
        count = "" if sample.ranks is None else str(len(sample.ranks))
        rows.append([esc(name) + " " + flagged, count, *(_signal(sample, each) for each in signals),
                     *(esc(_figure(each, sample.host.get(each))) for each in hosts)])  # fmt: skip
    head = ["node", "ranks", *(each.replace("_", " ") for each in (*signals, *hosts))]
    more = note_html(f"{len(ordered) - SHOWN_NODES:,} more nodes") if len(ordered) > SHOWN_NODES else ""
    return table_html(head, rows, range(1, len(head))) + more


def _signal(sample: NodeSample, name: str) -> str:
    found = table(sample.signals.get(name))
    middle, most, rank = (number(found.get(key)) for key in ("median", "max", "rank"))
    if middle is None:
        return esc(text(sample.absent.get(name)) and "not known")
    where = "" if rank is None or most == middle else note_html(f"rank {rank:.0f}: {_figure(name, most)}")
    return esc(_figure(name, middle)) + where


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("bytes_per_second"):
        return format_rate(value, "B")
    if name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:.0%}" if name.endswith("share") else f"{value:,.4g}"
