"""Start a proof: plan the task, make its twin, run both in disposable processes and say whether they are equal."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, VerificationFailed
from paceline.plan.plan import Plan
from paceline.plan.session import Planned, plan_task
from paceline.run.arguments import plan_spec
from paceline.run.handover import hand_over
from paceline.run.recovery.supervisor import supervise
from paceline.spec import Spec
from paceline.verify.twin import twin_layout, twin_plan, twin_task

DTYPES = ("fp32", "fp64")
STEPS = 3
Say = Callable[[str], None]


def verify_spec(
    spec: Spec,
    *,
    layout: str | None = None,
    steps: int = STEPS,
    dtypes: Sequence[str] = DTYPES,
    say: Say | None = None,
) -> dict[str, Any]:
    """Return whether the spec's plan, or the given layout ("dp_shard=2"), equals one device.

    The result is {equal, layouts: [{layout, equal, seconds, steps, dtypes, differences, first_difference}]}.
    """
    if layout is not None:
        asked = plan_spec(layout)
        devices = max(1, asked.dp_replicate) * max(1, asked.dp_shard)
        cluster = dataclasses.replace(spec.cluster, devices=devices)
        spec = dataclasses.replace(spec, plan=asked, cluster=cluster)
    planned = plan_task(spec, say=say)
    result = verify_planned(planned, steps=steps, dtypes=dtypes)
    return {"equal": result["equal"], "layouts": [result]}


def verify_planned(planned: Planned, *, steps: int = STEPS, dtypes: Sequence[str] = DTYPES) -> dict[str, Any]:
    """Return the proof of one planned task: the worst differences over all dtypes, and the first that is too large."""
    began = time.perf_counter()
    plan = planned.plan
    task = twin_task(planned.spec.task, plan, planned.facts.vocab)
    plans = [twin_plan(plan, dtype) for dtype in dtypes]
    results = run_twin(dataclasses.replace(planned.spec, task=task), plans, steps)
    wrong = next((result for result in results if not result["equal"]), None)
    differences = {
        quantity: max(result["differences"][quantity] for result in results) for quantity in results[0]["differences"]
    }
    return {
        "layout": str(plan.layout),
        "ran_as": str(twin_layout(plan.layout)),
        "equal": wrong is None,
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "dtypes": {result["dtype"]: result["differences"] for result in results},
        "differences": differences,
        "first_difference": wrong and {**wrong["first_difference"], "dtype": wrong["dtype"]},
        "refused_because": None,
    }


def run_twin(spec: Spec, plans: Sequence[Plan], steps: int) -> list[dict[str, Any]]:
    """Compare the plans, which must share one number of ranks, with the reference in processes of their own."""
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder = Path(name)
        request = {
            "spec": str(hand_over(spec, folder)),
            "plans": [dataclasses.asdict(p) for p in plans],
            "steps": steps,
        }
        (folder / "request.json").write_text(json.dumps(request))
        result = folder / "result.json"
        command = [sys.executable, "-m", "paceline.verify.worker", str(folder / "request.json"), str(result)]
        # The proof needs no speed and no GPU; one thread a rank keeps it light and repeatable.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        outcome = supervise(command, plans[0].layout.devices, environ)
        if outcome.exit_code:
            details = outcome.error or {"what": "a process of the proof ended", "because": "", "try": ""}
            failure = PacelineError(str(details["what"]), str(details["because"]), str(details["try"]))
            failure.exit_code = outcome.exit_code
            raise failure
        return json.loads(result.read_text())


def verify_text(result: dict[str, Any]) -> str:
    """Return the proof in a line: "equal to one device: loss 0, grad norm 3e-8, weights 1e-7 (2.1 s)"."""
    worst = result["differences"]
    if result["equal"]:
        sizes = ", ".join(
            f"{label} {worst[quantity]:.0e}" if worst[quantity] else f"{label} 0"
            for label, quantity in (("loss", "loss"), ("grad norm", "grad_norm"), ("weights", "weights"))
        )
        return f"equal to one device: {sizes} ({result['seconds']:.1f} s)"
    first = result["first_difference"]
    return (
        f"NOT equal to one device: {first['quantity']} of {first['name']} at step {first['step']} on rank"
        f" {first['rank']} differs by {first['relative']:.1e} in {first['dtype']} (ratio {first['ratio']:.6g})"
    )


def failure_of(result: dict[str, Any]) -> VerificationFailed:
    """Return the error for a layout that is not equal to one device."""
    first = result["first_difference"]
    return VerificationFailed(
        f"layout {result['layout']} does not compute the numbers of one device",
        f"{verify_text(result)}; likely cause: {first['likely']}",
        "paceline verify SPEC --json for every quantity; --no-verify trains all the same",
    )
