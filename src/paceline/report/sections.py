"""The report's sections as HTML text, made of the pieces of `drawn/markup.py`, which escape what the journal holds."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from paceline.config.values import toml, toml_key
from paceline.history.records import json_safe, number, table
from paceline.report.compare import Promise, TermGroup
from paceline.report.drawn.markup import difference, esc, known, listing, note_html, pill, shown, table_html, tag
from paceline.report.format import figure, quantities, utc
from paceline.report.summary import Event, Summary
from paceline.spec.journal.records.decided import PLAN
from paceline.spec.plan import PlanSpec
from paceline.units import format_bytes, format_count, format_loss, format_rate, format_seconds

UNSET = json_safe(dataclasses.asdict(PlanSpec()))  # `[plan]` of a spec that leaves all to the planner
VERDICTS = {
    "inside": ("good", "kept"),
    "below": ("good", "kept, below"),
    "above": ("warn", "exceeded"),
    "unknown": ("none", "unknown"),
}


def groups_table(groups: Sequence[TermGroup], unit: str, total: Promise) -> str:
    """Return forecast against measured: a row per group with its terms, formulas and sources below, then the total."""
    if not groups:
        return ""
    rows = []
    for group in groups:
        ahead, measured = quantities((group.forecast, group.measured), unit)
        rows.append(
            f'<tr class="group"><td>{esc(group.name)}</td><td class="n">{esc(ahead)}</td>'
            f'<td class="n">{esc(measured)}</td>'
            f'<td class="n">{esc(difference(group.error))}</td><td>{note_html(group.note)}</td></tr>'
        )
        rows += [
            f'<tr class="term"><td>{esc(term.name)}</td><td class="n">{esc(known(term.value, unit))}</td><td></td>'
            f"<td></td><td>{esc(term.formula)} {tag(term.source)}</td></tr>"
            for term in group.terms
        ]
    ahead, measured = quantities((total.forecast, total.measured), unit)
    rows.append(
        f'<tr class="total"><td>{esc(total.name)}</td><td class="n">{esc(ahead)}</td>'
        f'<td class="n">{esc(measured)}</td><td class="n">{esc(difference(total.error))}</td>'
        f"<td>{esc(interval_words(total))}</td></tr>"
    )
    head = '<th scope="col">term</th>' + "".join(
        f'<th scope="col" class="n">{word}</th>' for word in ("forecast", "measured", "difference")
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}<th scope="col">formula and source</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def interval_words(promise: Promise) -> str:
    """Return "80 % interval 1.8 s to 2.0 s", or nothing where there is none."""
    if promise.low is None or promise.high is None:
        return ""
    return "80 % interval {} to {}".format(*quantities((promise.low, promise.high), promise.unit))


def error_block(summary: Summary) -> str:
    """Return what ended a failed run: what, because, try."""
    if not summary.error:
        return ""
    rows = listing((word, summary.error[word]) for word in ("because", "try"))
    return f'<div class="alert" role="alert"><b>{esc(summary.error["what"] or "The run failed")}</b>{rows}</div>'


def sources(summary: Summary) -> list[tuple[str, str]]:
    """Return a row for each source of a mixture: what the run read of it."""
    return [
        (f"of {name}", f"{format_count(number(given.get('samples')) or 0)} samples, {epochs:.2f} epochs")
        for name, given in summary.sources.items()
        if (epochs := number(given.get("epochs"))) is not None
    ]


def slowest(summary: Summary) -> str:
    """Return the slowest steps, each with the part that took longer than usual."""
    rows = [
        (
            f"{slow.step:,}",
            esc(format_seconds(slow.seconds)),
            esc(f"{slow.slower_part.replace('_', ' ')} +{format_seconds(slow.slower_by_seconds)}")
            if slow.slower_by_seconds and slow.slower_by_seconds > 0
            else "",
            esc(slow.remark),
        )
        for slow in summary.speed.slowest
    ]
    body = table_html(("step", "seconds", "slower than its median", "remark"), rows, (0, 1))
    return f"<h3>Slowest steps</h3>{body}" if body else ""


def decisions(events: Sequence[Event]) -> str:
    """Return every automatic choice: what, from, to, because, evidence."""
    rows = [
        (
            esc(utc(event.time).removesuffix(" UTC")),
            esc(shown(event.fields.get("what"))),
            esc(shown(_asked(event.fields)) or "–"),
            esc(shown(event.fields.get("to")) or "–"),
            esc(shown(event.fields.get("because"))) + note_html(shown(event.fields.get("evidence"))),
        )
        for event in events
    ]
    return table_html(("time (UTC)", "what", "from", "to", "because"), rows)


def _asked(fields: Mapping[str, object]) -> object:
    """Return what a decision is from; of a plan's the options that the spec sets, "auto" where it sets none."""
    found = fields.get("from")
    if fields.get("what") != PLAN or not isinstance(found, dict):
        return found
    return {name: value for name, value in found.items() if name not in UNSET or value != UNSET[name]} or "auto"


def moved(found: Mapping[str, object] | None) -> str:
    """Return how far a model has moved from the weights that it started from, block by block."""
    if not found:
        return ""
    blocks = table(found.get("blocks"))
    rows = [
        [
            esc(name),
            esc(_share(table(of_block).get("distance"))),
            esc(format_count(table(of_block).get("parameters") or 0)),
        ]
        for name, of_block in blocks.items()
    ]
    losses = [number(found.get(name)) for name in ("loss_at_start", "loss_now")]
    both = f"{format_loss(losses[0])}, now {format_loss(losses[1])}" if None not in losses else ""
    fresh = found.get("fresh") or 0
    return listing(
        [("distance", f"{_share(found.get('distance'))} of the norm of the starting weights"),
         ("held-out loss", f"at the start {both}" if both else ""),
         ("started fresh", f"{fresh:,} parameters, which are not compared" if fresh else "")]
    ) + table_html(("block", "relative distance", "parameters"), rows, (1, 2))  # fmt: skip


def _share(value: object) -> str:
    return f"{value:.3%}" if isinstance(value, int | float) else "unknown"


def verification(found: Mapping[str, object] | None) -> str:
    """Return the proof that the plan equals one device, or that it was not made."""
    if not found:
        return '<p class="note">No proof on record: the run has a single device, or run.verify is off.</p>'
    equal = found.get("equal")
    good = "ill-conditioned" if found.get("verdict") == "ill-conditioned" else "equal to one device"
    word = pill("good", good) if equal is True else pill("bad", "differs from one device")
    differences = found.get("differences")
    rows = (
        [(name.replace("_", " "), shown(value)) for name, value in differences.items()]
        if isinstance(differences, dict)
        else []
    )
    seconds = found.get("seconds")
    took = format_seconds(seconds) if isinstance(seconds, int | float) else ""
    return f"<p>{word} {esc(shown(found.get('text')))}</p>" + listing(
        [("precision", shown(found.get("dtype"))), *rows, ("took", took)]
    )


def starts(summary: Summary) -> str:
    """Return the starts of the run, and its faults and checkpoints."""
    rows = [
        (
            str(attempt.number),
            esc(utc(attempt.started).removesuffix(" UTC")),
            esc(format_seconds(attempt.seconds)),
            esc(f"{attempt.resumed_at_step:,}" if attempt.resumed_at_step is not None else "–"),
            esc(f"{attempt.last_step:,}" if attempt.last_step is not None else "–"),
            f"{attempt.lost_steps:,}",
            esc(attempt.world_size if attempt.world_size is not None else "–"),
            esc(attempt.status + (f" ({attempt.exit_code})" if attempt.exit_code else "")),
        )
        for attempt in summary.attempts
    ]
    head = ("start", "began (UTC)", "lasted", "steps before", "last step", "steps lost", "devices", "ended")
    faults = [
        (
            esc(utc(event.time).removesuffix(" UTC")),
            str(event.attempt),
            esc(shown(event.fields.get("what"))),
            esc(shown(event.fields.get("because"))),
            esc(", ".join(f"{k} {shown(v)}" for k, v in event.fields.items() if k not in ("what", "because"))),
        )
        for event in summary.faults
    ]
    body = table_html(head, rows, (0, 2, 3, 4, 5, 6))
    if faults:
        body += "<h3>Faults</h3>" + table_html(("time (UTC)", "start", "what", "because", "details"), faults, (1,))
    saved = summary.checkpoints
    if saved.count:
        size = format_bytes(saved.last_bytes) if saved.last_bytes else "unknown size"
        at = f"after step {saved.last_step:,}" if saved.last_step is not None else ""
        body += "<h3>Checkpoints</h3>" + listing(
            [
                ("written", f"{saved.count} in {format_seconds(saved.total_seconds)}"),
                ("in all", format_bytes(saved.total_bytes)),
                ("last", f"{size} {at}".strip()),
                ("path", saved.last_path),
            ]
        )
    return body


def cluster(found: Mapping[str, object]) -> str:
    """Return the machines: every figure with its source and note."""
    device, links = table(found.get("device")), found.get("links")
    named = [(name, name, value) for name, value in (*device.items(), *found.items())]
    for link in links if isinstance(links, list) else []:
        level = f"{shown(table(link).get('level'))} link: "
        named += [(level + name, name, value) for name, value in table(link).items()]
    rows = []
    for title, name, value in named:
        known = number(table(value).get("value"))
        if "value" in table(value):
            words = "unknown" if known is None else figure(name, known)
            note = note_html(shown(value.get("note")))
            rows.append((esc(title.replace("_", " ")), esc(words), tag(shown(value.get("source"))) + note))
    listed = device.get("assumed_rates")
    assumed = {shown(name) for name in listed} if isinstance(listed, list) else set()
    for key, source in (("matmul_flops", shown(device.get("matmul_source"))), ("peak_flops", "published")):
        for precision, points in table(device.get(key)).items():
            best = number(points) if key == "peak_flops" else _best_rate(points)
            if best is not None:
                word = "dense peak" if key == "peak_flops" else "matrix products"
                standing = "assumed" if source == "published" and f"peak_flops.{precision}" in assumed else source
                rows.append((esc(f"{word}, {precision}"), esc(format_rate(best, "FLOP")), tag(standing)))
    about = [
        (name.replace("_", " "), shown(found.get(name))) for name in ("devices", "devices_per_node", "host", "date")
    ]
    heading = listing([("device", shown(device.get("name"))), *about])
    return heading + table_html(("figure", "value", "source"), rows, (1,))


def _best_rate(points: object) -> float | None:
    """Return the highest rate of measured points (width, FLOP/s)."""
    pairs = points if isinstance(points, list) else []
    rates = [number(pair[1]) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return max((rate for rate in rates if rate is not None), default=None)


def spec_toml(spec: Mapping[str, object], prefix: str = "") -> str:
    """Return a spec from the journal as TOML that `paceline train` reads; unset values are left out."""
    own = {key: value for key, value in spec.items() if value is not None and not isinstance(value, dict)}
    free = {key: value for key, value in spec.items() if isinstance(value, dict) and key == "arguments"}
    lines = [f"{toml_key(key)} = {toml(value)}" for key, value in {**own, **free}.items()]
    text = (f"[{prefix}]\n" if prefix and lines else "") + "\n".join(lines)
    tables = [
        spec_toml(value, f"{prefix}.{toml_key(key)}" if prefix else toml_key(key))
        for key, value in spec.items()
        if isinstance(value, dict) and key not in free
    ]
    return "\n\n".join(part for part in (text, *tables) if part)


def reproduce(summary: Summary) -> str:
    """Return how to make the run again: the command, the versions, the seed, the data and the whole spec."""
    found = summary.reproduce
    data = {key: value for key, value in found.data.items() if value not in (None, "", [], {})}
    parameters = f"{format_count(found.parameters)} ({found.parameters:,.0f})" if found.parameters else ""
    rows = [
        ("seed", "" if found.seed is None else str(found.seed)),
        ("parameters", parameters),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items())),
        ("host", found.host),
        *((f"data: {name.replace('_', ' ')}", shown(value)) for name, value in data.items()),
    ]
    command = f"<pre>{esc(shlex.join(found.command))}</pre>" if found.command else ""
    spec = f"<details open><summary>The whole spec</summary><pre>{esc(spec_toml(found.spec))}</pre></details>"
    set_by = [(esc(key), esc(origin)) for key, origin in found.provenance.items() if origin != "default"]
    origins = table_html(("value", "set by"), set_by)
    if origins:
        origins = f"<details><summary>Where values other than defaults come from</summary>{origins}</details>"
    return command + listing(rows) + (spec if found.spec else "") + origins
