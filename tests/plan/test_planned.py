"""From a spec to a planned task and its words, on built-in data and on a user's module."""

import re
import subprocess
import sys

import pytest

from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.explain.choice import tried_text
from paceline.plan.explain.explain import LISTED, explain_lines
from paceline.plan.explain.headline import headline_lines
from paceline.plan.explain.lines import WIDTH
from paceline.plan.explain.money import money_text
from paceline.plan.planned import plan_task
from paceline.spec.load import load_spec
from paceline.task.profile.apart import _trace_in_child

SMALL = ["task.data.max_bytes=200000", "task.model=llama-1m", "task.data.seq_len=64", "task.global_batch=4096 tokens"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("A paceline is a line of riders who share the work. " * 2000)
    return f"task.data.source={path}"


def planned_with(text, *overrides):
    return plan_task(load_spec(None, [*SMALL, text, *overrides]))


def test_headline_has_the_look_of_the_product(text):
    planned = planned_with(text, "cluster.device=cpu", "cluster.devices=2", "cluster.price_usd_per_device_hour=0.1")
    task, cluster, plan, price = headline_lines(planned)
    assert task.startswith("task     llama-1m on ") and task.endswith("· 4,096 tokens/step · 300 steps · seed 7")
    assert cluster.startswith("cluster  this machine: 2 x cpu · ") and "between ranks" in cluster
    assert plan == f"plan     {planned.plan}"
    assert price.startswith("         ") and "/device · " in price and "$" in price
    assert re.search(r"/step (±|-\d+/\+)\d+%", price)
    fit, refused = len(planned.search.candidates), len(planned.search.refused)
    tried = tried_text(planned.contest)
    assert f"best of {fit:,} that fit, {refused:,} refused{tried}: --explain" in price
    assert tried == f", {len(planned.contest.contenders) - 1} more worth a try"


@pytest.mark.parametrize(("device", "price"), [("cpu", "x1.00 of a step's time"), ("h100-sxm", "not measured on cuda")])
def test_the_price_of_deterministic_kernels_is_part_of_the_promise(text, device, price):
    usual = headline_lines(planned_with(text, f"cluster.device={device}"))
    *same, told = headline_lines(planned_with(text, f"cluster.device={device}", "run.deterministic=true"))
    assert same == usual and f"deterministic kernels: {price}" in told


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_explanation_holds_everything_in_100_columns(text, device):
    planned = planned_with(text, f"cluster.device={device}", "cluster.devices=2")
    lines = explain_lines(planned)
    assert max(len(line) for line in lines if "paceline train" not in line) <= WIDTH, "commands stay whole"
    whole = " ".join(" ".join(lines).split())
    for term in (*planned.forecast.time, *planned.forecast.memory):
        assert term.name in whole and " ".join(term.formula.split()) in whole
    for refusal in planned.search.refused:
        assert refusal.because in whole
    assert sum(" no" in line or " none " in line for line in lines)
    assert len(lines) > min(len(planned.search.candidates), LISTED)
    assert all(remark in whole for remark in planned.remarks)


def test_reason_threads_and_peak_are_there_for_the_run(text):
    planned = planned_with(text, "cluster.device=h100-sxm", "plan.precision=bf16")
    assert planned.reason.startswith("fastest of ") and "bf16 as the spec asks" in planned.reason
    assert planned.threads == 0 and planned.peak_flops("bf16") == 989.4e12
    assert planned.peak_name("bf16") == "of published dense peak"
    assert planned.batch_samples == 64 and planned.steps == 300


def test_too_little_memory_and_closed_axes_raise(text):
    with pytest.raises(DoesNotFit, match="does not fit"):
        planned_with(text, "cluster.device=cpu", "cluster.memory_per_device=10 MB")
    with pytest.raises(DoesNotFit, match="kv_heads = 2 cannot be shared evenly by tp = 4"):
        planned_with(text, "cluster.device=h100-sxm", "cluster.devices=4", "plan.tp=4")
    assert planned_with(text, "cluster.device=h100-sxm", "cluster.devices=2", "plan.tp=2").plan.layout.tp == 2


def test_planning_a_built_in_model_imports_no_torch(text):
    code = (
        "import sys; from paceline.spec.load import load_spec; from paceline.plan.planned import plan_task;"
        f"plan_task(load_spec(None, {[*SMALL, text]!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


MODULE = """
import torch
from torch import nn

def build(width=16):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), *layers, nn.Linear(width, 4))

def broken():
    raise RuntimeError("no such shape")

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((12,), float(index)), index % 4
"""


def test_a_users_module_is_traced_in_a_child(tmp_path):
    (tmp_path / "my_points.py").write_text(MODULE)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[task]\nglobal_batch = "8 samples"\nmodel = "my_points:build"\n[task.data]\nsource = "my_points:Points"\n'
    )
    code = (
        "import sys; from paceline.spec.load import load_spec; from paceline.task.profile.apart import trace_task;"
        f"profile = trace_task(load_spec({str(spec)!r}).task);"
        "print(profile.parameters, profile.source, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(12 * 16 + 16 + 3 * (16 * 16 + 16) + 16 * 4 + 4), "traced", "False"]
    with pytest.raises(ConfigError) as error:  # the child's error keeps its kind and words
        _trace_in_child(load_spec(spec, ["task.model=my_points:broken"]).task)
    assert "no such shape" in str(error.value)


def test_money_is_never_invented():
    assert [money_text(usd) for usd in (float("nan"), 0.0, 0.001, 0.5, 1234.5)] == [
        "price unknown",
        "$0.00",
        "$0.001",
        "$0.50",
        "$1,234",
    ]


def test_tf32_is_in_the_price_of_fp32_products(text):
    wide = ["task.model=llama-1b", "task.data.seq_len=1024", "task.global_batch=64 samples"]
    asked = ["cluster.device=h100-sxm", *wide, "plan.precision=fp32"]
    plain, rounded = (planned_with(text, *asked, f"run.tf32={switch}") for switch in ("false", "true"))
    peaks = plain.cluster.device.peak_flops
    assert rounded.peak_flops("fp32") == peaks["tf32"] > plain.peak_flops("fp32") == peaks["fp32"]
    assert rounded.forecast.step_seconds.value < plain.forecast.step_seconds.value
    bf16 = [
        planned_with(text, *asked[:-1], "plan.precision=bf16", f"run.tf32={switch}") for switch in ("false", "true")
    ]
    assert bf16[0].forecast.step_seconds == bf16[1].forecast.step_seconds
    cpu = [planned_with(text, "cluster.device=cpu", f"run.tf32={switch}").cluster for switch in ("false", "true")]
    assert cpu[0] == cpu[1]
