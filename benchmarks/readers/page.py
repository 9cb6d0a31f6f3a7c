"""The page of `benchmarks/data.py`: the tables of its parts, and on which machine and day each part was made."""

from __future__ import annotations

from typing import Any

from readers import BASELINE, READERS
from readers.batches import BATCH, RANKS

TABLES = ("resume", "cold", "batches")  # the parts that are no readers


def page(report: dict[str, Any]) -> str:
    """Return the tables."""
    parts = report["parts"]
    lines = [
        "# Reading samples of text", "",
        f"Batches of {report['rows']} rows of {report['seq_len']:,} tokens with their labels. All readers keep the"
        " memory that they free, as ranks of a run on a CPU do.",
        "Neighbours: how often windows less than 8 apart meet in a batch of 64, against a uniform shuffle. Medians of"
        " rounds; each reader is held against a memory map that took turns with it. In brackets: against plain numpy"
        " that gives as much, which the map does not where documents are told apart.", "",
    ]  # fmt: skip
    lines += _readers(parts)
    if "resume" in parts:
        many = f"{report['resume_samples']:,}"
        lines += [
            "",
            f"| from opening to a batch anywhere in {many} samples | median, ms | most, ms |",
            "|---|---:|---:|",
        ]
        for kind, row in parts["resume"]["rows"].items():
            lines.append(f"| {kind} | {row['median'] * 1e3:.1f} | {row['most'] * 1e3:.1f} |")
    if "cold" in parts:
        lines += [
            "",
            "| a cold epoch of remote shards | bytes fetched over their bytes | requests |",
            "|---|---:|---:|",
        ]
        for kind, row in parts["cold"]["rows"].items():
            lines.append(f"| {kind} | {row['amplification']:.3f} | {row['requests']:,} |")
    if "batches" in parts:
        lines += _batches(parts["batches"]["rows"])
    lines += [
        "",
        "| part | made on | load before and after | million tokens | rounds | memory map, µs a row |",
        "|---|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_made(name, part) for name, part in parts.items())]) + "\n"


def _readers(parts: dict[str, Any]) -> list[str]:
    """Return the table of all readers, in the order of the list; the baseline is that of the first part."""
    lines = [
        "| reader | CPU µs a row | over the memory map | first batch, ms | memory, MB | neighbours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows: dict[str, Any] = {}
    for name, part in parts.items():
        if name not in TABLES:
            rows = {**part["rows"], **rows}
    notes: dict[str, list[str]] = {}
    for name in (name for name in READERS if name in rows):
        row = rows[name]
        if "not_measured" in row:
            lines.append(f"| {name} | {row['not_measured']} | | | | |")
            continue
        near = f"{row['near']:.2f}" if "near" in row else ""
        same = f" ({row['over_same']:.2f})" if "over_same" in row else ""
        if note := row.get("note"):
            notes[note] = [*notes.get(note, []), name]
        lines.append(
            f"| {name} | {row['cpu'] * 1e6:.1f} | {row['over_memory_map']:.2f}{same} | {row['first'] * 1e3:.0f} |"
            f" {row['memory'] / 1e6:.0f} | {near} |"
        )
    told = [f"{' and '.join(names)}: {note}." for note, names in notes.items()]
    return [*lines, *([""] if told else []), *told]


def _batches(rows: dict[str, Any]) -> list[str]:
    lines = [
        "",
        f"Global batches of {BATCH} rows of the Python library over {RANKS} ranks: what of a rank's rows is padding,"
        " and tokens of the fullest rank over the mean.",
        "",
        "| samples | how many | empty | fullest rank: median | 95 % | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, row in rows.items():
        lines.append(
            f"| {kind} | {row['rows']:,} | {row['waste']:.2%} | {row['skew_median']:.4f} | {row['skew_95']:.4f} |"
            f" {row['skew_max']:.3f} |"
        )
    return lines


def _made(name: str, part: dict[str, Any]) -> str:
    """Return the line of a part: where and when it was made, and how busy the machine was."""
    about, base = part["machine"], part["rows"].get(BASELINE, {})
    what = name if name in TABLES else f"readers, {'no package' if name == 'none' else name}"
    made = f"{about['date']}, {about['cpu']}, {about['cores']} cores, torch {about['torch']}"
    load = " and ".join(f"{each:.1f}" for each in part["load"]) or "not noted"
    load += ", real-time priority" if part.get("real_time") else ""
    micro = f"{base['cpu'] * 1e6:.2f}" if "cpu" in base else ""
    return f"| {what} | {made} | {load} | {part['tokens'] / 1e6:.0f} | {part.get('rounds', '')} | {micro} |"
