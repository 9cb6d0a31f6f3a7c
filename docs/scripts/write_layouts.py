"""Proves every layout of every family and writes docs/layouts-proven.md from the results.

`python docs/scripts/write_layouts.py` proves all families, `--family decoder` one of them; results are kept in
docs/proofs/layouts/, one JSON file for each family, with the date and the version of torch. `--page` proves nothing and
writes the page anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from proof_tasks import FAMILIES, Family, spec_of

from paceline.spec.layout import Layout
from paceline.verify.compare.tolerance import TOLERANCES
from paceline.verify.process.every import verify_all
from paceline.verify.process.start import STEPS, verify_spec

DOCS = Path(__file__).parents[1]
KEPT, PAGE = DOCS / "proofs" / "layouts", DOCS / "layouts-proven.md"
DTYPES = ("fp64", "fp32")
SHOWN = ("loss", "gradients", "weights")
HEAD = """<!-- Written by docs/scripts/write_layouts.py; run it again instead of editing. -->

# Layouts, proven

What `paceline verify` measured for every layout of each family: the layout in real processes against one device,
{steps} steps, in fp64 and in fp32, on the [twin](guide/plan/inside-a-proof.md#the-twin) of the task.
Every number is the
largest relative difference over all ranks, steps and tensors. The bounds are those of
[verifying](guide/plan/verifying.md#what-is-compared): in fp64 {fp64:g} for every gradient, the global norm and every
weight after the updates; in fp32 {loss:g} for the loss and {weights:g} for gradients and weights. The samples that are
read, the weights at the start, the number of items counted and the tokens per expert must be the same.

A layout that is not in a table cannot be had; the reasons stand below it.
"""


def prove(family: Family) -> dict[str, Any]:
    """Return the results of a family as they are kept."""
    import torch

    with tempfile.TemporaryDirectory(prefix="paceline-proofs-") as folder:
        spec = spec_of(family, Path(folder))
        found = verify_all(spec, family.largest, dtypes=DTYPES, say=print, progress=print)
        for layout in family.also:
            found.append(verify_spec(spec, layout=layout, dtypes=DTYPES))
            print(f"verify   {layout}: {'equal' if found[-1].equal else found[-1]}", flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "steps": STEPS,
        "largest": family.largest,
        "layouts": [
            {
                "layout": proof.layout,
                "equal": proof.equal,
                "seconds": round(proof.seconds, 1),
                "differences": {
                    dtype: {name: float(f"{value:.1e}") for name, value in found.items()}
                    for dtype, found in proof.dtypes.items()
                },
                "first_difference": proof.first_difference and dataclasses.asdict(proof.first_difference),
                "error": proof.error,
            }
            for proof in found
            if not proof.refused_because
        ],
        "refused": {proof.layout: proof.refused_because for proof in found if proof.refused_because},
    }


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page for the results of families, by name."""
    bounds = {"fp64": TOLERANCES["weights"]["fp64"], "loss": TOLERANCES["loss"]["fp32"]}
    parts = [HEAD.format(steps=STEPS, weights=TOLERANCES["weights"]["fp32"], **bounds)]
    parts += ["## Summary\n", _summary(results)]
    for name, family in FAMILIES.items():
        if name in results:
            parts.append(_section(family, results[name]))
    return "\n".join(parts)


def _summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = ["| family | layouts | of ranks | fp64, worst of all | fp32 loss | fp32 weights | run on, torch |"]
    rows.append("|---|---:|---:|---:|---:|---:|---|")
    for name, family in FAMILIES.items():
        if name not in results:
            continue
        result = results[name]
        proofs = result["layouts"]
        equal = sum(proof["equal"] for proof in proofs)
        count = f"{equal}" if equal == len(proofs) else f"**{equal} of {len(proofs)} equal**"
        ranks = [devices_of(proof["layout"]) for proof in proofs]
        worst = max(_fp64(proof) for proof in proofs)
        loss, weights = (max(_of(proof, "fp32", what) for proof in proofs) for what in ("loss", "weights"))
        rows.append(
            f"| [{family.title}](#{_anchor(family.title)}) | {count} | 2 to {max(ranks)} | {worst:.0e} | {loss:.0e} |"
            f" {weights:.0e} | {result['date']}, {result['torch']} |"
        )
    return "\n".join(rows) + "\n"


def _section(family: Family, result: Mapping[str, Any]) -> str:
    lines = [f"## {family.title}\n", f"{family.what}\n"]
    lines.append(
        "| layout | ranks | fp64 loss | fp64 gradients | fp64 weights | fp32 loss | fp32 gradients | fp32 weights |"
    )
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for proof in sorted(result["layouts"], key=lambda proof: devices_of(proof["layout"])):
        name = proof["layout"] if proof["equal"] else f"**{proof['layout']}: not equal**"
        sizes = [_of(proof, dtype, what) for dtype in DTYPES for what in SHOWN]
        shown = " | ".join(f"{size:.0e}" if size else "0" for size in sizes)
        lines.append(f"| {name} | {devices_of(proof['layout'])} | {shown} |")
    reasons = _reasons(result["refused"])
    if reasons:
        lines += ["", "Cannot be had:", ""]
        lines += [f"- {', '.join(f'`{name}`' for name in names)}: {because}" for because, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _reasons(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return reason -> the layouts that it rules out."""
    reasons: dict[str, list[str]] = {}
    for layout, text in refused.items():
        reasons.setdefault(text.partition("cannot be had: ")[2] or text, []).append(layout)
    return reasons


def devices_of(layout: str) -> int:
    """Return how many ranks a layout has, from its text."""
    return Layout(**{axis: int(degree) for axis, _, degree in (part.partition("=") for part in layout.split())}).devices


def _of(proof: Mapping[str, Any], dtype: str, what: str) -> float:
    return float(proof["differences"].get(dtype, {}).get(what, float("nan")))


def _fp64(proof: Mapping[str, Any]) -> float:
    return max(proof["differences"].get("fp64", {"": float("nan")}).values())


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def read_results() -> dict[str, dict[str, Any]]:
    """Return the results that are kept, by family."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))}


def main(words: Sequence[str] | None = None) -> None:
    """Prove what is asked for, keep the results and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this family; may be given again")
    parser.add_argument("--page", action="store_true", help="prove nothing, write the page alone")
    options = parser.parse_args(words)
    for name in [] if options.page else options.family or FAMILIES:
        result = prove(FAMILIES[name])
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(read_results()), encoding="utf-8")


if __name__ == "__main__":
    main()
