"""What a trace tells: time by class, what was hidden, and gaps; on traces written by hand, and torn ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.observe.traces.summary import TraceSummary, summarise_trace
from paceline.observe.traces.texts import trace_lines
from paceline.observe.traces.trace_spans import class_of, length, less, overlap, own_times, read_trace, union
from paceline.run.trace.naming import COLLECTIVES, collective_of, named

MS = 1000.0  # of a trace's unit


def event(name: str, begin: float, ms: float, kind: str = "cpu_op", line: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": line, "ts": begin * MS, "dur": ms * MS}


def written(path: Path, events: list[dict[str, Any]], **about: Any) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*map(named, events)], "paceline": {"rank": 3, **about}}, file)
    return path


def summary_of(path: Path, forecast: Any = ()) -> TraceSummary:
    found = summarise_trace(read_trace(path), path, forecast)
    assert found is not None
    return found


def phases(of_step: int, begin: float) -> list[dict[str, Any]]:
    return [event(f"paceline: step {of_step}", begin, 100, "user_annotation"),
            event("paceline: forward and backward passes", begin, 60, "user_annotation"),
            event("paceline: gradient reduction", begin + 60, 30, "user_annotation"),
            event("paceline: optimizer", begin + 90, 10, "user_annotation")]  # fmt: skip


def test_a_cpus_step_is_told_by_class(tmp_path: Path) -> None:
    events = [*phases(7, 0), *phases(8, 100)]
    for at in (0, 100):
        events += [
            event("aten::linear", at, 50),
            event("aten::addmm", at, 40),  # one inside of the other: counted once
            event("gloo:all_reduce", at + 40, 40, "user_annotation", line=2),  # beside 10 ms of computing
            event("Optimizer.step#AdamW.step", at + 90, 10, "user_annotation"),
            event("aten::_foreach_add_", at + 90, 9),
        ]
    forecast = [{"kind": "products", "value": 0.04}, {"kind": "sync", "value": 0.01}, {"kind": "host", "value": 0.02}]
    found = summary_of(written(tmp_path / "rank-3.json.gz", events), forecast)
    assert (found.rank, found.first, found.last) == (3, 7, 8) and found.step_seconds == pytest.approx(0.1)
    by_name = {each.name: each for each in found.classes}
    assert by_name["products"].seconds == pytest.approx(0.05) and by_name["products"].forecast == 0.04
    assert by_name["optimizer"].seconds == pytest.approx(0.009)
    assert by_name["communication"].seconds == pytest.approx(0.04) and by_name["communication"].forecast == 0.01
    assert found.hidden_share == pytest.approx(0.25)
    # Nothing runs from 80 ms to 90 ms, in the reduction, and for 1 ms of the optimizer.
    assert dict(found.gaps)["gradient reduction"] == pytest.approx(0.01)
    assert by_name["gaps of the host"].seconds == pytest.approx(0.011) and by_name["gaps of the host"].forecast == 0.02
    lines = trace_lines(found)
    assert "25% was hidden" in "\n".join(lines) and lines[0].startswith("rank 3, steps 7 to 8: 100 ms each")


def test_what_waits_for_a_collective_computes_nothing(tmp_path: Path) -> None:
    """A function of autograd that gathers: the call returns at once, and Python waits for the bytes after it."""
    events = [
        *phases(1, 0),
        event("_Move", 0, 50), event("c10d::allgather_", 0, 5), event("gloo:all_gather", 5, 40, "user_annotation", 2),
        event("aten::copy_", 45, 3),
        event("aten::mm", 50, 10), event("gloo:all_reduce", 50, 10, "user_annotation", 2),  # beside computing
        # In one span, as a collective that blocks: what is around it computes for no moment of it either.
        event("BackwardOfMove", 60, 20), event("c10d::reduce_scatter_", 61, 18),
        # As torch's compiler calls it, beside a collective too.
        event("mkldnn::_linear_pointwise", 80, 5), event("gloo:all_reduce", 80, 9, "user_annotation", 2),
        event("CompiledFunctionBackward", 85, 4),
    ]  # fmt: skip
    found = summary_of(written(tmp_path / "rank-3.json.gz", events))
    by_name = {each.name: each.seconds for each in found.classes}
    assert by_name["communication"] == pytest.approx(0.045 + 0.010 + 0.018 + 0.009)
    assert by_name["element by element, and the rest"] == pytest.approx(0.002 + 0.002 + 0.004)
    assert by_name["copies and casts"] == pytest.approx(0.003) and by_name["products"] == pytest.approx(0.015)
    assert found.hidden_share == pytest.approx(19 / 82)


def test_on_a_device_its_kernels_count_and_not_what_starts_them(tmp_path: Path) -> None:
    events = [
        *phases(1, 0), event("aten::mm", 0, 90),
        event("ampere_sgemm_128x64", 10, 30, "kernel", 7), event("flash_fwd_kernel", 40, 10, "kernel", 7),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, "kernel", 9),
    ]  # fmt: skip
    events[-1]["args"] = {"Process Group Description": "mesh_dp_replicate"}
    found = summary_of(written(tmp_path / "rank-3.json.gz", events))
    by_name = {each.name: each.seconds for each in found.classes}
    assert by_name["products"] == pytest.approx(0.03) and by_name["attention"] == pytest.approx(0.01)
    assert found.hidden_share == pytest.approx(0.75)
    assert dict(found.gaps)["forward and backward passes"] == pytest.approx(0.01)
    names = {span.name for span in read_trace(tmp_path / "rank-3.json.gz").spans}
    assert "paceline: all-reduce over dp_replicate" in names


def test_grown_tensors_are_told(tmp_path: Path) -> None:
    grown = [{"tensors": "(8, 8) float32 on cpu", "more": 3, "bytes": 768}]
    found = summary_of(written(tmp_path / "rank-3.json.gz", phases(1, 0), grown=grown))
    assert "grown: 3 more of (8, 8) float32 on cpu" in trace_lines(found)[-1]


@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b"{"), gzip.compress(b"[]"),
                                     gzip.compress(json.dumps({"traceEvents": [1]}).encode()),
                                     gzip.compress(b"{}" * 4000)[:-12]],
                         ids=["empty", "no gzip", "torn", "a list", "no events", "cut off"])  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="no trace"):
        read_trace(path)
    assert summarise_trace(read_trace(written(tmp_path / "rank-1.json.gz", [])), path) is None, "without a step"


def test_collectives_have_one_name_whoever_makes_them() -> None:
    told = {"gloo:all_reduce": "all-reduce", "nccl:_all_gather_base": "all-gather",
            "c10d::reduce_scatter_": "reduce-scatter",
            "ncclDevKernel_SendRecv(ncclDevKernelArgs)": "send", "c10d::alltoall_base_": "all-to-all",
            "nccl:something_new": "collective", "aten::gather": "", "aten::all": ""}  # fmt: skip
    assert {name: collective_of(name) for name in told} == told
    assert all(collective_of(f"gloo:{word.replace('-', '_')}") == word for word, _ in COLLECTIVES if word != "receive")


def test_intervals() -> None:
    trace = [event("a", 0, 10), event("b", 2, 3), event("c", 4, 2), event("d", 20, 5)]
    spans = [type("S", (), {})() for _ in trace]
    for span, each in zip(spans, trace, strict=True):
        span.begin, span.end = each["ts"], each["ts"] + each["dur"]
        span.seconds = each["dur"]
    assert union(spans) == [(0, 10 * MS), (20 * MS, 25 * MS)] and length(union(spans)) == 15 * MS
    assert overlap([(0, 5), (8, 12)], [(4, 9), (11, 20)]) == 1 + 1 + 1
    assert less([(0, 10), (12, 20)], [(2, 3), (9, 13), (19, 30)]) == [(0, 2), (3, 9), (13, 19)]
    assert own_times(spans)[0] == [(0, 2 * MS), (6 * MS, 10 * MS)], "c begins in b and ends after it"
    assert own_times(spans)[1:] == [[(2 * MS, 4 * MS)], [(4 * MS, 6 * MS)], [(20 * MS, 25 * MS)]]


def test_classes_of_operators() -> None:
    def span(name: str) -> str:
        from paceline.observe.traces.trace_spans import TracedSpan

        return class_of(TracedSpan(name, "cpu_op", 0, 1, (0, 0)))

    assert [span(name) for name in ("aten::_scaled_dot_product_flash_attention", "aten::mm", "aten::_fused_adamw_",
                                    "aten::mul", "aten::native_layer_norm", "aten::copy_")] == [
        "attention", "products", "optimizer", "element by element, and the rest", "normalisation and softmax",
        "copies and casts"]  # fmt: skip
