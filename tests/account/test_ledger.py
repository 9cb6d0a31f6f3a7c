"""The ledger of journals made by hand: devices at each moment, what they did, and what it cost."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from runs import in_process

from paceline.account.bill import Bill, bill_csv, make_bill
from paceline.account.ledger import LedgerEntry, ledger_of
from paceline.account.prices import BookPrice, PriceBook, read_prices
from paceline.account.texts import note_lines, table_of
from paceline.account.timeline import held_devices
from paceline.errors import ConfigError, StorageError
from paceline.history.records import gather
from paceline.observe.dash.bill_page import bill_page
from paceline.observe.live.run import LiveRun
from paceline.observe.live.spent import spent_so_far
from paceline.report.html import render_html
from paceline.report.summary import summarise
from paceline.spec.journal.kinds import parse
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.watching import NodeSample

START = 1_772_323_200.0
Record = dict[str, Any]


def bill_lines(bill: Bill) -> list[str]:
    """Return the table and what stands under it, as the command prints them."""
    return [*table_of(bill), *note_lines(bill)]


def figure(value: Any) -> Record:
    return {"value": value, "source": "published", "note": ""}


def started(attempt: int, at: float, devices: int, **changes: Any) -> Record:
    cluster = {
        "device": {"name": "h100-sxm"}, "devices": devices, "price_usd_per_device_hour": figure(3.6),
        "watts_per_device": figure(1000.0), "carbon_g_per_kwh": figure(100.0),
    }  # fmt: skip
    run = {"tags": {"team": "speech"}}
    return {"kind": "run_started", "attempt": attempt, "time": START + at, "world_size": devices, "plan_text": "plan",
            "cluster": cluster, "spec": {"run": run}, "forecast": {}, **changes}  # fmt: skip


def step(attempt: int, number: int, at: float, seconds: float = 10.0) -> Record:
    return {"kind": "step", "attempt": attempt, "step": number, "time": START + at,
            "seconds": {"total": seconds, "data": 1.0}, "loss": 1.0, "weight": 1.0}  # fmt: skip


def stormy() -> list[Record]:
    """Two ranks; one is lost at 40 s and the other goes on at 46 s; the run is killed at 70 s; then three ranks.

    Step 4 of the second world is made again by the second start, which begins at 100 s.
    """
    recovered = {"detect": 1.0, "end": 1.0, "start": 2.0, "restore": 2.0, "step": 10.0, "total": 16.0}
    return [
        started(1, 0, 2), step(1, 1, 20), step(1, 2, 30), {"kind": "checkpoint", "attempt": 1, "step": 2,
        "time": START + 33, "seconds": 3.0, "stall_seconds": 2.0, "path": "x", "bytes": 1},
        step(1, 3, 56),
        {"kind": "recovery", "attempt": 1, "time": START + 56, "rung": "reform", "because": "killed", "from_world": 2,
         "to_world": 1, "step": 2, "steps_lost": 0, "seconds": recovered},
        step(1, 4, 66), {"kind": "fault", "attempt": 1, "time": START + 70, "what": "killed", "because": "9"},
        started(2, 100, 3, step=3), step(2, 4, 115), step(2, 5, 125),
        {"kind": "evaluation", "attempt": 2, "step": 5, "time": START + 130, "seconds": 4.0, "loss": 1.0},
        {"kind": "run_ended", "attempt": 2, "time": START + 130, "status": "complete"},
    ]  # fmt: skip


def by_kind(entries: list[LedgerEntry]) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for entry in entries:
        kinds[entry.kind] = kinds.get(entry.kind, 0.0) + entry.device_seconds
    return kinds


def test_devices_times_time_add_up_and_each_kind_is_what_a_hand_counts() -> None:
    """0-40 s: 2 devices, 40-46 s recovering with 2, 46-70 s: 1 device, 100-130 s: 3 devices."""
    entries = ledger_of(stormy(), "run")
    assert sum(entry.device_seconds for entry in entries) == pytest.approx(46 * 2 + 24 * 1 + 30 * 3)
    assert by_kind(entries) == pytest.approx(
        {
            "useful": 2 * 9 * 2 + 9 * 1 + (2 * 9 + 4) * 3,  # steps 1, 2; step 3; steps 4, 5 and the evaluation
            "stall": 2 * 1 * 2 + 1 * 1 + 2 * 1 * 3,  # waiting for data
            "lost": 10 * 1,  # step 4 of the first start
            "checkpoint": 2 * 2,
            "restart": 10 * 2 + 6 * 2 + 5 * 3,  # until the first steps, and recovering
            "idle": (1 + 7) * 2
            + 4 * 1
            + 1 * 3,  # after step 2, between the save and the fault; cut off; before the end
        }
    )
    assert [(held.devices, held.seconds) for held in held_devices(gather(stormy()))] == [
        (2, 40.0), (2, 6.0), (1, 24.0), (3, 30.0),
    ]  # fmt: skip
    assert [entry.usd for entry in entries] == pytest.approx([entry.device_seconds / 1000 for entry in entries])
    assert sum(entry.kwh or 0.0 for entry in entries) == pytest.approx(206 / 3600)
    assert sum(entry.carbon_g or 0.0 for entry in entries) == pytest.approx(206 / 36)


def test_a_run_of_three_days_pays_in_each_of_them(tmp_path: Path) -> None:
    """From 18:00 to 06:00 two days later: 6, 24 and 6 hours; steps of 5 hours, and one hour of starting."""
    night = datetime.datetime(2026, 3, 1).timestamp()
    begun = night - 6 * 3600 - START
    steps = [step(1, number, begun + 3600 + number * 5 * 3600, 5 * 3600.0) for number in range(1, 8)]
    lines = [started(1, begun, 2), *steps]
    entries = ledger_of(lines, "run")
    hours: dict[str, dict[str, float]] = {}
    for entry in entries:
        day = hours.setdefault(entry.day, {})
        day[entry.kind] = day.get(entry.kind, 0.0) + entry.device_seconds / 3600
    wait = 1 / 3600 / 5  # hours of waiting in an hour of steps
    assert hours == {
        "2026-02-28": pytest.approx({"restart": 2.0, "useful": 2 * 5 * (1 - wait), "stall": 2 * 5 * wait}),
        "2026-03-01": pytest.approx({"useful": 2 * 24 * (1 - wait), "stall": 2 * 24 * wait}),
        "2026-03-02": pytest.approx({"useful": 2 * 6 * (1 - wait), "stall": 2 * 6 * wait}),
    }
    run = write_journal(tmp_path, lines)
    march = make_bill([run], "month", since=datetime.date(2026, 3, 1))
    assert [(row.group, row.device_hours) for row in march.rows] == [("2026-03", pytest.approx(60.0))]
    book = PriceBook((BookPrice(usd_per_device_hour=1.0), BookPrice(usd_per_device_hour=3.0, since="2026-03-02")))
    assert sum(entry.usd or 0.0 for entry in ledger_of(lines, "run", book)) == pytest.approx(12 + 48 + 3 * 12)


def node(at: float, joules: float, ranks: list[int], seconds: float = 10.0, **host: float) -> NodeSample:
    given = {"device_joules": joules, **host} if joules else dict(host)
    found = parse({"kind": "node", "attempt": 1, "time": START + at, "node": "a", "seconds": seconds, "ranks": ranks,
                   "signals": {}, "host": given, "absent": {}, "flagged": []})  # fmt: skip
    assert isinstance(found, NodeSample)
    return found


def test_energy_is_that_of_the_counters_where_they_cover_a_stretch() -> None:
    """40 s of 2 GPUs that take 600 W each and a host of 200 W, with a building of 1.2; the last sample ends after."""
    lines = [started(1, 0, 2, cluster={**started(1, 0, 2)["cluster"], "pue": figure(1.2)}), step(1, 1, 40)]
    samples = [node(10.0 * each, 12000.0, [0, 1], cpu_joules=2000.0) for each in range(1, 5)] + [node(50, 9e9, [0, 1])]
    entries = ledger_of(lines, "run", samples=samples)
    assert sum(entry.kwh or 0.0 for entry in entries) == pytest.approx(40 * 1400 * 1.2 / 3.6e6)
    assert sum(entry.carbon_g or 0.0 for entry in entries) == pytest.approx(40 * 1400 * 1.2 / 3.6e6 * 100)
    assert {entry.how["kwh"] for entry in entries} == {"measured by the counters of GPUs and processors"}
    assert [entry.usd for entry in entries] == pytest.approx([entry.device_seconds / 1000 for entry in entries])
    modelled = ledger_of(lines, "run")
    for few in (samples[:3], [node(40, 0.0, [0, 1], 40.0, cpu_joules=9.0)], [node(40, 5.0, [0], 40.0)]):
        found = [dataclasses.replace(entry, nodes=modelled[0].nodes) for entry in ledger_of(lines, "run", samples=few)]
        assert found == modelled, "three quarters; no GPU's counter; one node of two"


def test_a_journal_without_a_start_costs_nothing_and_one_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_journal(tmp_path, [step(1, 1, 10)])
    assert make_bill([run]).total.device_hours == 0.0

    def refused(path: Path, mode: str = "r") -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(StorageError, match=r"(?s)cannot be read.*0001.jsonl") as error:
        make_bill([run])
    assert error.value.exit_code == 74


def test_a_step_that_says_more_than_the_clock_does_not_make_time() -> None:
    lines = [started(1, 0, 4), step(1, 1, 10, seconds=30.0), {"kind": "run_ended", "attempt": 1, "time": START + 12}]
    assert sum(entry.device_seconds for entry in ledger_of(lines, "run")) == pytest.approx(4 * 12)


def test_a_price_book_replaces_prices_by_day_and_class_and_electricity_goes_by_the_hour(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        '[[prices]]\naccelerator = "h100-sxm"\nusd_per_device_hour = 7.2\nuntil = "2026-02-27"\n'
        '[[prices]]\naccelerator = "h100-sxm"\nusd_per_device_hour = 1.8\nsince = "2026-02-28"\n'
        '[[prices]]\naccelerator = "*"\nprice_class = "spot"\nusd_per_device_hour = 0.36\n'
        '[[electricity]]\nhours = "22-06"\nusd_per_kwh = 0.1\n[[electricity]]\nusd_per_kwh = 0.4\n'
        "[power]\npue = 1.5\ncarbon_g_per_kwh = 10\n"
    )
    book = read_prices(path)
    assert book.usd_per_hour("h100-sxm", "spot", START) == 0.36
    assert book.usd_per_kwh(0, 86400 * 3) == pytest.approx((8 * 0.1 + 16 * 0.4) / 24)
    entries = ledger_of(stormy(), "run", PriceBook(book.prices[:2], (), book.power))
    assert sum(entry.usd or 0.0 for entry in entries) == pytest.approx(206 * 1.8 / 3600)
    assert sum(entry.kwh or 0.0 for entry in entries) == pytest.approx(206 * 1.5 / 3600)
    assert sum(entry.carbon_g or 0.0 for entry in entries) == pytest.approx(206 * 1.5 * 10 / 3600)
    with_power = ledger_of(stormy(), "run", book, "spot")
    tariff = book.usd_per_kwh(START, START + 1)
    assert tariff in (0.1, 0.4), "130 seconds lie in one hour, whatever the time zone"
    assert sum(entry.usd or 0.0 for entry in with_power) == pytest.approx(206 / 3600 * (0.36 + 1.5 * tariff))


def test_devices_that_may_be_taken_away_cost_their_share_of_a_books_price(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[[prices]]\nusd_per_device_hour = 3.6\nspot_ratio = 0.25\n")
    spot = [{**line, "spec": {"cluster": {"spot": True}}} if "spec" in line else line for line in stormy()]
    paid = [sum(entry.usd or 0.0 for entry in ledger_of(lines, "run", read_prices(path))) for lines in (stormy(), spot)]
    assert paid == [pytest.approx(0.206), pytest.approx(0.206 / 4)]
    path.write_text("[[prices]]\nusd_per_device_hour = 3.6\n")
    assert sum(entry.usd or 0.0 for entry in ledger_of(spot, "run", read_prices(path))) == pytest.approx(0.206)
    path.write_text("[[prices]]\nspot_ratio = 1.5\n")
    with pytest.raises(ConfigError, match="spot_ratio"):
        read_prices(path)


def test_what_devices_draw_without_work_is_told_beside_what_they_drew(tmp_path: Path) -> None:
    """A kilowatt at work and 400 W without, in a building of 1.5; what a counter says may be less than the model."""
    idle = {**started(1, 0, 2)["cluster"], "waiting_watts_per_device": figure(400.0), "pue": figure(1.5)}
    lines = [started(1, 0, 2, cluster=idle), step(1, 1, 40)]
    assert sum(entry.baseline_kwh or 0.0 for entry in ledger_of(lines, "run")) == pytest.approx(80 * 600 / 3.6e6)
    frugal = [node(40, 80 * 100.0, [0, 1], 40.0)]
    assert [entry.baseline_kwh for entry in ledger_of(lines, "run", samples=frugal)] == [
        entry.kwh for entry in ledger_of(lines, "run", samples=frugal)
    ]
    write_journal(tmp_path / "a", lines)
    assert "40% of the energy is what held devices draw without any work" in "\n".join(
        bill_lines(make_bill([tmp_path]))
    )
    write_journal(tmp_path / "b", stormy())
    assert "at least" in "\n".join(bill_lines(make_bill([tmp_path])))


def test_runs_that_are_on_a_node_at_once_share_what_its_processors_took(tmp_path: Path) -> None:
    """20 s alone with one rank, then 20 s beside three ranks of another run: their sum is what the node's counter says.

    GPUs are a run's own, and are not shared out.
    """
    cpu = {**started(1, 0, 1)["cluster"], "device": {"name": "cpu", "kind": "cpu"}}
    for name, began, devices in (("a", 0, 1), ("b", 20, 3)):
        lines = [started(1, began, devices, cluster=cpu), step(1, 1, 40)]
        for moment in range(began + 10, 41, 10):
            sample = node(moment, 0.0, list(range(devices)), cpu_joules=1000.0)
            lines.append({**dataclasses.asdict(sample), "kind": "node"})
        write_journal(tmp_path / name, lines)
    bill = make_bill([tmp_path])
    by_run = {row.group: row.kwh for row in bill.rows}
    assert by_run == {"a": pytest.approx(2500 / 3.6e6), "b": pytest.approx(1500 / 3.6e6)}
    assert bill.shared == {"a": pytest.approx(20.0)} and "a had several of these runs at once for 20 s" in str(
        bill_lines(bill)
    )
    assert make_bill([tmp_path / "a"]).total.kwh == pytest.approx(4000 / 3.6e6), "alone, a node's counter is its own"


def test_electricity_and_carbon_by_the_hour_are_those_of_the_hours_in_which_a_run_trains(tmp_path: Path) -> None:
    """The same files that a run's window is chosen by (run.when) stand in the price book."""
    (tmp_path / "usd.csv").write_text("".join(f"{hour},{0.01 * (hour + 1)}\n" for hour in range(24)))
    (tmp_path / "grams.csv").write_text("".join(f"{hour},{10 * (hour + 1)}\n" for hour in range(24)))
    path = tmp_path / "prices.toml"
    path.write_text('[[prices]]\nusd_per_device_hour = 0.36\n'
                    '[power]\ntariff_hours = "usd.csv"\ncarbon_hours = "grams.csv"\n')  # fmt: skip
    entries = ledger_of(stormy(), "run", read_prices(path))
    kwh = sum(entry.kwh or 0.0 for entry in entries)
    factor = datetime.datetime.fromtimestamp(START).hour + 1
    assert sum(entry.carbon_g or 0.0 for entry in entries) == pytest.approx(kwh * 10 * factor)
    assert sum(entry.usd or 0.0 for entry in entries) == pytest.approx(206 * 0.36 / 3600 + kwh * 0.01 * factor)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[prices]]\nusd_per_hour = 1\n', r"prices.toml:2: unknown key 'prices.1.usd_per_hour'"),
        ('[[prices]]\nusd_per_device_hour = -1\n', "prices"),
        ('[[prices]]\nsince = "March"\n', r"prices\[1\] has 'March'"),
        ('[[prices]]\nsince = "2026-06-01"\nuntil = "2026-01-31"\n', r"prices\[1\] holds on no day"),
        ('[[prices]]\nusd_per_device_hour = nan\n', "finite"),
        ('[[electricity]]\nhours = "22-30"\n', r"electricity\[1\] has '22-30'"),
        ('[[electricity]]\nhours = "5-5"\n', r"electricity\[1\] has '5-5'"),
        ('[[prices]]\nsince = "2026-02-29"\n', r"prices\[1\] has '2026-02-29'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_price_book_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_prices(tmp_path / "prices.toml")


def write_journal(run: Path, lines: list[Record]) -> Path:
    (run / "journal").mkdir(parents=True)
    for attempt in {line["attempt"] for line in lines}:
        own = "".join(json.dumps(line) + "\n" for line in lines if line["attempt"] == attempt)
        (run / "journal" / f"{attempt:04d}.jsonl").write_text(own)
    return run


def runs(folder: Path) -> Path:
    other = [{**line, "spec": {"run": {"tags": {"team": "=cmd"}}}} if "spec" in line else line for line in stormy()]
    free = [{**line, "cluster": {}, "spec": {}} if "spec" in line else line for line in stormy()]
    for name, lines in (("a", stormy()), ("b", other), ("c", free)):
        write_journal(folder / name, lines)
    return folder


def test_a_bill_groups_runs_by_their_tags_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    bill = make_bill([runs(tmp_path)], "team")
    assert [row.group for row in bill.rows] == ["speech", "=cmd", "(none)"] and bill.runs == 3
    assert [row.usd for row in bill.rows] == [pytest.approx(0.206), pytest.approx(0.206), None]
    assert bill.total.usd == pytest.approx(0.412) and bill.total.missing == {"usd", "kwh", "carbon_kg"}
    assert bill.total.device_hours == pytest.approx(3 * 206 / 3600)
    by_kind = bill_lines(make_bill([tmp_path], "kind"))
    assert by_kind[0].split()[-1] == "share" and max(map(len, by_kind[:4])) < 70, (
        "six shares of 0 and one of 1 in a row"
    )
    assert any(line.startswith("total") and line.endswith(" 100.0%") for line in by_kind)
    text = "\n".join(bill_lines(bill))
    assert "unknown" in text and "money      estimated" in text
    header, _, second, *_ = bill_csv(bill).splitlines()
    assert header.startswith("team,device_hours,usd,kwh,carbon_kg,useful_device_hours")
    assert second.startswith("'=cmd,"), "a spreadsheet takes it for no formula"
    assert sum(float(row.hours["lost"]) for row in make_bill([tmp_path], "kind").rows) == pytest.approx(3 * 10 / 3600)


def test_whatever_a_tag_is_a_bill_has_a_line_for_it_and_a_terminal_obeys_none(tmp_path: Path) -> None:
    tag = 'a,b\nc\x1b[2J<script>alert(1)</script>"'
    write_journal(tmp_path / "run", [started(1, 0, 2, spec={"run": {"tags": {"team": tag}}}), step(1, 1, 20)])
    bill = make_bill([tmp_path], "team")
    group, head, rule, row, figures, *_ = bill_lines(bill)  # the name is too long to have them beside it
    assert (group, row) == ("team", r'a,b\nc\x1b[2J<script>alert(1)</script>"')
    assert len(head) == len(figures) == len(rule) <= 100
    assert list(csv.reader(io.StringIO(bill_csv(bill))))[1][0] == tag
    assert "<script>alert" not in bill_page(bill, "now")


def test_a_damaged_line_whose_moment_no_calendar_has_costs_nothing(tmp_path: Path) -> None:
    """One line of garbage ended the bill, the report and the live page with a traceback."""
    for place, junk in enumerate((1e308, -1e18, 2**70, "9" * 5000, [1], math.nan)):
        lines = [*stormy(), {**stormy()[-1], "kind": "run_ended", "goes_on": junk}]
        torn = [{**line, "time": junk} if line["kind"] in ("evaluation", "fault") else line for line in lines]
        torn[0] = {**torn[0], "began": junk}
        run = write_journal(tmp_path / str(place), torn)
        whole = [line for line in lines if line["kind"] not in ("evaluation", "fault")]
        assert make_bill([run]).total.device_hours == pytest.approx(
            sum(entry.device_seconds for entry in ledger_of(whole, "run")) / 3600
        )
        render_html(summarise(read_journal(run)))
        live = LiveRun(run)
        live.refresh()
        assert spent_so_far(live) and live.phases()


def test_nodes_share_what_a_run_has_cost_and_their_sum_is_the_whole(tmp_path: Path) -> None:
    """One of two nodes has three ranks of four. Without samples a run is its host's, and one on two nodes nobody's."""
    lines = [{**started(1, 0, 4), "host": "here"}, step(1, 1, 40)]
    run = write_journal(tmp_path / "run", lines)
    beside = run / "journal" / "nodes"
    samples = [node(10.0 * each, 0.0, [0]) for each in range(1, 5)] + [
        dataclasses.replace(node(10.0 * each, 0.0, [1, 2, 3]), node="b") for each in range(1, 5)
    ]
    (entry, *_) = ledger_of(lines, "run", samples=samples)
    assert sorted(entry.nodes.values()) == [0.25, 0.75] and entry.nodes["b"] == 0.75
    assert not beside.exists()
    bill, whole = make_bill([run], "node"), make_bill([run])
    assert [row.group for row in bill.rows] == ["here"] and bill.rows[0].device_hours == whole.total.device_hours
    several = {**lines[0], "spec": {"run": {"nodes": {"count": 2}}}}
    assert ledger_of([several, lines[1]], "run")[0].nodes == {"(not sampled)": 1.0}
    assert in_process("bill", run, "--by", "node", "--export", tmp_path / "bill.html").returncode == 0
    page = (tmp_path / "bill.html").read_text()
    assert "What runs cost, by node" in page and "default-src 'none'" in page and "<script" not in page


def test_a_run_in_an_hour_that_a_tariff_lacks_has_cost_nobody_knows_what(tmp_path: Path) -> None:
    """The price of its devices alone would be said to be all."""
    lacking = (datetime.datetime.fromtimestamp(START).hour + 6) % 24
    (tmp_path / "usd.csv").write_text(f"{lacking},0.1\n")
    path = tmp_path / "prices.toml"
    path.write_text('[[prices]]\nusd_per_device_hour = 0.36\n[power]\ntariff_hours = "usd.csv"\n')
    assert {entry.usd for entry in ledger_of(stormy(), "run", read_prices(path))} == {None}
    path.write_text(f'[[prices]]\nusd_per_device_hour = 0.36\n[[electricity]]\nhours = "{lacking}-{lacking + 1}"\n')
    assert {entry.usd for entry in ledger_of(stormy(), "run", read_prices(path))} == {None}


def test_what_holds_no_run_and_a_tag_of_nobody_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        make_bill([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="a bill by 'tea'"):
        make_bill([runs(tmp_path)], "tea")
