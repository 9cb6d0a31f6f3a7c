"""The head of a Hugging Face model computes the loss in chunks, to the last digits, where nothing follows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_huggingface import Rows, causal
from tests_shared import VOCAB, decoder_task, plan_of, run_steps
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.huggingface.head import LIMIT, chunked_loss, limit_logits
from paceline.task.models.layers import loss
from paceline.task.objective import next_token

SEQ, WIDTH = 16, 32


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Mixtral", "GPTNeoX"])
def test_chunks_are_the_whole(family: str) -> None:
    torch.manual_seed(0)
    model = causal(family).double().eval()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    batch = Rows(SEQ).read(torch.arange(5).numpy())
    whole, weight = next_token(model, batch)
    whole.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert limit_logits(model, 3 * VOCAB, 5 * SEQ)
    chunked, chunked_weight = next_token(model, batch)
    chunked.backward()
    assert torch.equal(weight, chunked_weight)
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=0)
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-11, msg=name)
    logits: Any = model(batch["tokens"])
    assert logits.logits.shape == (5, SEQ, VOCAB), "its head is its own again"


def test_logits_never_exist_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    chunk = loss.loss_chunk_tokens
    monkeypatch.setattr(loss, "loss_chunk_tokens", lambda vocab, limit: sizes.append(limit) or chunk(vocab, limit))
    model, batch = causal("Llama"), Rows(SEQ).read(torch.arange(5).numpy())
    assert limit_logits(model, 3 * VOCAB, 5 * SEQ)
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() and out.shape[-1] == VOCAB and out.shape[0] != WIDTH:
                largest.append(out.numel())
            return out

    with Watch():
        next_token(model, batch)[0].backward()
    assert sizes == [3 * VOCAB] and max(largest) == 3 * VOCAB
    next_token(model, {name: rows[:1, :3] for name, rows in batch.items()})
    assert len(sizes) == 1, "few enough to be whole"
    assert not limit_logits(causal("Llama"), 5 * SEQ * VOCAB, 5 * SEQ)


@pytest.mark.parametrize(
    ("family", "changes"), [("Gemma2", {"final_logit_softcapping": 30.0}), ("Granite", {"logits_scaling": 4.0})]
)
def test_a_model_that_changes_its_logits_keeps_them_whole(family: str, changes: dict[str, Any]) -> None:
    model = causal(family, **changes)
    assert not limit_logits(model, 1, 1) and not hasattr(model, LIMIT)
    assert not limit_logits(nn.Linear(2, 2), 1, 1)


def test_one_that_changes_them_later_is_named() -> None:
    model: Any = causal("Llama")
    assert limit_logits(model, 1, 1)
    forward = model.forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    model.forward = capped
    with pytest.raises(ConfigError, match="does something to its logits"):
        chunked_loss(model, torch.zeros(1, SEQ, dtype=torch.long), torch.zeros(1, SEQ, dtype=torch.long), {})


def llama() -> nn.Module:
    torch.manual_seed(3)
    return causal("Llama")


def curve(plans: list[Plan]) -> list[list[float]]:
    task = decoder_task(model=llama, data=Rows(SEQ), objective="next_token")
    return [[one.loss for one in run_steps(task, plan, 3)[0]] for plan in plans]


def test_layouts_agree_in_chunks_and_whole() -> None:
    few = {"precision": "fp64", "logits_elements": 3 * VOCAB}
    (whole,) = curve([plan_of(Layout(), precision="fp64")])
    for plan in (few, {**few, "recompute": "full"}):
        assert_curves_close(curve([plan_of(Layout(), **plan)])[0], whole)
    low = curve([plan_of(Layout(), precision="bf16", logits_elements=3 * VOCAB)])[0]
    assert_curves_close(low, whole, MEAN_LOSS_BF16)
    plans = [plan_of(Layout(dp_shard=2), **few), plan_of(Layout(dp_shard=2), **{**few, "precision": "bf16"})]
    for exact, rounded in run_ranks(curve, 2, plans):
        assert_curves_close(exact, whole)
        assert_curves_close(rounded, whole, MEAN_LOSS_BF16)
