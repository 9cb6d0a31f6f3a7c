"""The head of a Hugging Face model computes the loss in chunks, to the last digits, where nothing follows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from distributed import run_kept
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_huggingface import Rows, causal
from tests_shared import VOCAB, decoder_task, plan_of, run_steps
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.data.sources.mapped import MapSource
from paceline.task.metrics.resolve import metrics_of
from paceline.task.models.huggingface.head import LIMIT, chunked_loss, limit_logits
from paceline.task.models.layers import loss
from paceline.task.objective import next_token, sequence_to_sequence, sequence_to_sequence_logits
from paceline.verify.low.low import low

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
    assert len(sizes) == 2, "few logits take the same way, as sharded ranks may have other numbers of them"
    assert not limit_logits(causal("Llama"), 5 * SEQ * VOCAB, 5 * SEQ)


@pytest.mark.parametrize(
    ("family", "changes"), [("Gemma2", {"final_logit_softcapping": 30.0}), ("Granite", {"logits_scaling": 4.0})]
)
def test_a_model_that_changes_its_logits_keeps_them_whole(family: str, changes: dict[str, Any]) -> None:
    model = causal(family, **changes)
    assert not limit_logits(model, 1, 1) and not hasattr(model, LIMIT)
    assert not limit_logits(nn.Linear(2, 2), 1, 1)


def pairs(rows: int, target: int = SEQ) -> dict[str, Tensor]:
    """Return sources of unequal length, with targets of which some labels are masked."""
    draws = torch.Generator().manual_seed(5)
    source, decoded, labels = (
        torch.randint(1, VOCAB, (rows, length), generator=draws) for length in (9, target, target)
    )
    mask = (torch.arange(9)[None] < torch.arange(3, 3 + rows)[:, None]).long()
    labels[:, -3:] = -100
    return {"source": source, "source_mask": mask, "target": decoded, "labels": labels}


def t5(**changes: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, **changes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_targets_of_sources_are_chunked_as_tokens_are(changes: dict[str, Any]) -> None:
    """T5 scales what its tied head is given, and returns what the head returns."""
    torch.manual_seed(0)
    model, batch = t5(**changes).double().eval(), pairs(5)
    whole, weight = sequence_to_sequence(model, batch)
    whole.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert limit_logits(model, 3 * VOCAB, 5 * SEQ)
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() and out.shape[-1] == VOCAB and out.shape[0] != WIDTH:
                largest.append(out.numel())
            return out

    with Watch():
        chunked, chunked_weight = sequence_to_sequence(model, batch)
        chunked.backward()
    assert max(largest) == 3 * VOCAB and torch.equal(weight, chunked_weight)
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=0)
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-11, msg=name)
    assert sequence_to_sequence_logits(model, batch).shape == (5, SEQ, VOCAB), "its head is its own again"


def test_an_encoder_decoder_that_adds_to_its_logits_keeps_them_whole() -> None:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    assert not limit_logits(model, 1, 1) and not hasattr(model, LIMIT)


class Pairs:
    """A source of pairs whose samples are counted, as a map-style data set is."""

    samples, items_per_sample, unit, vocab, fingerprint = 1000, 1, "samples", VOCAB, "pairs"
    lengths = np.full(1000, 9 + SEQ)  # of both

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return rows that depend on their ids alone."""
        every = pairs(64)
        return {name: rows[torch.from_numpy(np.asarray(ids) % 5)] for name, rows in every.items()}


def test_a_run_of_pairs_holds_few_logits_and_measures_metrics_on_whole_ones() -> None:
    """Of two rows of sixteen tokens 32 x 61 logits are whole; of three at a time, the metric is the same."""
    task = decoder_task(model=t5, objective="seq2seq", data=Pairs())
    found = []
    for elements in (2**27, 3 * VOCAB):
        world = join_world("cpu", threads=1)
        built = assemble(task, plan_of(Layout(), precision="fp64", logits_elements=elements), world, task.data, 1)
        assert hasattr(built.model, LIMIT) == (elements < 2**27)
        metrics = metrics_of(EvaluateSpec(metrics=("accuracy",)), task.data, sequence_to_sequence)
        result = evaluate(built.stepper, task.data, 4, 0, metrics)
        found.append((result.loss, result.weight, result.metrics["accuracy"]))
    assert found[0][1:] == found[1][1:] and found[1][0] == pytest.approx(found[0][0], rel=1e-12)


class Uneven:
    """A data set of targets of which the first is the shortest; rows are filled up to the longest beside them."""

    vocab, unit, fingerprint = VOCAB, "samples", "uneven pairs"

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in pairs(1, 4 + SEQ * bool(index)).items()}

    def collate(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the rows as a batch."""
        fill = {"labels": -100}
        return {name: nn.utils.rnn.pad_sequence([row[name] for row in rows], True, fill.get(name, 0))
                for name in rows[0]}  # fmt: skip


class Counted(Uneven):
    """The same, whose lengths are known."""

    fills_up, lengths = True, [13, 29, 29, 29, 29, 29]


@pytest.mark.parametrize("kind", [Uneven, Counted])
def test_targets_that_are_longer_than_the_first_one_have_few_logits_at_a_time_too(kind: type[Uneven]) -> None:
    """The first sample was read, and stood for all: its logits were few, and those of the others whole."""
    source = MapSource(kind(), 7)
    plan = plan_of(Layout(), precision="fp64", logits_elements=10 * VOCAB)
    task = decoder_task(model=t5, objective="seq2seq", data=source)
    built = assemble(task, plan, join_world("cpu", threads=1), source, 1)
    assert plan.micro_batch * 4 < 10 < plan.micro_batch * (4 + SEQ), "rows of the first length would be few"
    assert getattr(built.model, LIMIT) == 10 * VOCAB


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
    for exact, rounded in run_kept(curve, 2, plans):
        assert_curves_close(exact, whole)
        assert_curves_close(rounded, whole, MEAN_LOSS_BF16)


def test_ranks_of_more_and_of_fewer_logits_than_the_limit_do_not_wait_for_each_other() -> None:
    """Those of one row were whole, and those of two in chunks: sharded ranks then waited for each other for ever."""
    between = {"precision": "fp64", "batch": 13, "logits_elements": SEQ * VOCAB * 3 // 2}
    (whole,) = curve([plan_of(Layout(), precision="fp64", batch=13)])
    for (sharded,) in run_kept(curve, 2, [plan_of(Layout(dp_shard=2), **between)], timeout_seconds=60):
        assert_curves_close(sharded, whole)


def tied_llama() -> nn.Module:
    torch.manual_seed(3)
    return causal("Llama", tie_word_embeddings=True)


def proven(layouts: list[Layout]) -> list[CheckProof]:
    world, found = join_world("cpu", threads=1), []
    for layout in layouts:
        task = decoder_task(model=tied_llama, data=Rows(SEQ), objective="next_token")
        plan = plan_of(layout, precision="bf16", logits_elements=3 * VOCAB)
        found.append(low(task, plan, world, task.data, SEQ, 2))
    return found


def test_one_device_rounds_the_heads_gradient_after_each_part_too() -> None:
    """With its logits whole it was off by eleven times what rounding may be: "NOT equal", and nothing was wrong."""
    for proof in run_kept(proven, 2, [Layout(dp_replicate=2), Layout(dp_shard=2)])[0]:
        assert proof.equal, proof.first_difference
