"""The decoder with experts: equal to Hugging Face's Mixtral for the same weights, and its balance to their formula."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from decoders import OPERATIONS, batch
from rounding import assert_close

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model, load_weights
from paceline.task.models.huggingface.experts import joined
from paceline.task.models.huggingface.weights import export_safetensors, from_hf_state, to_hf_config, to_hf_state
from paceline.task.models.init import initialise
from paceline.task.models.layers import products
from paceline.task.models.layers.balance import bias_step, expert_counts, sequence_balance
from paceline.task.models.layers.products import expert_products
from paceline.task.models.moe import MoE, MoEDecoder, RoutedLayer, routers
from paceline.task.models.shape import MoEConfig
from paceline.task.models.sizes import NAMED_SIZES, resolve_decoder

transformers = pytest.importorskip("transformers")


def tiny(**changes: object) -> MoEConfig:
    shape = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 50, "max_seq": 16,
             "tied": False, "experts": 6, "top_k": 2, "expert_ffn": 48}  # fmt: skip
    return MoEConfig("tiny-moe", **{**shape, **changes})  # type: ignore[arg-type]


def built(config: MoEConfig) -> MoEDecoder:
    model = MoEDecoder(config)
    initialise(model, seed=1)
    with torch.no_grad():  # larger than the usual start, so that routing is far from even
        for router in routers(model).values():
            router.weight.mul_(20)
    return model


QWEN3 = {"qk_norm": True, "dense_layers": 1, "renormalise": False, "head_dim": 12}
HF_CASES = [{"top_k": 1}, {"top_k": 2}, {"top_k": 6}, {"qk_norm": True, "top_k": 3}, {**QWEN3, "top_k": 2}]


def hugging_face(config: MoEConfig) -> torch.nn.Module:
    kind = "Qwen3Moe" if config.qk_norm else "Mixtral"
    described = getattr(transformers, f"{kind}Config")(**to_hf_config(config))
    return getattr(transformers, f"{kind}ForCausalLM")(described)


@pytest.mark.parametrize("changes", HF_CASES, ids=str)
def test_logits_and_gradients_equal_hugging_faces_for_the_same_weights_and_names(changes: dict) -> None:
    config = tiny(**changes)
    ours, theirs = built(config), hugging_face(config)
    missing = theirs.load_state_dict(to_hf_state(ours.state_dict()), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    back = from_hf_state(theirs.state_dict())
    assert back.keys() == ours.state_dict().keys()
    tokens, labels = batch(config)
    assert_close(ours(tokens), theirs(tokens).logits, OPERATIONS)
    ours.eval()  # no auxiliary loss
    loss, _ = ours(tokens, labels)
    loss.backward()
    torch.nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    ).backward()
    gradients = from_hf_state({n: p.grad for n, p in theirs.named_parameters()})
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():  # a router's is zero by construction where one expert gets all weight
        assert_close(dict(ours.named_parameters())[name].grad, gradient, OPERATIONS, name, largest)


@pytest.mark.parametrize(("changes", "kind"), [({}, "Mixtral"), (QWEN3, "Qwen3Moe")], ids=["Mixtral", "Qwen3Moe"])
def test_files_go_to_hugging_face_and_back(changes: dict, kind: str, tmp_path: Path) -> None:
    config = tiny(**changes)
    ours = built(config)
    export_safetensors(dict(ours.state_dict()), config, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    tokens, _ = batch(config)
    assert_close(ours(tokens), theirs(tokens).logits, OPERATIONS)
    theirs.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again = MoEDecoder(config)
        load_weights(again, str(tmp_path / folder))
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (described.get("num_local_experts") or described["num_experts"], described["num_experts_per_tok"]) == (6, 2)
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        load_weights(MoEDecoder(tiny(**{**changes, "top_k": 3})), str(tmp_path / "ours"))


def test_what_mixtral_cannot_compute_is_not_exported(tmp_path: Path) -> None:
    config = tiny(shared_ffn=16, renormalise=False)
    with pytest.raises(ConfigError, match="no shared experts, no weights that are not renormalised"):
        export_safetensors(dict(built(config).state_dict()), config, tmp_path)


def test_a_sigmoid_router_with_a_bias_and_shared_experts_is_deepseek_v3s_block() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = tiny(scoring="sigmoid", balance="bias", shared_ffn=16, expert_ffn=16, top_k=3)
    described = transformers.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
    )  # fmt: skip
    ours, theirs = built(config).layers[0].mlp, DeepseekV3MoE(described)
    ours.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    state = {name: joined(name, tensor) for name, tensor in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    x = torch.randn(2, 7, 32, requires_grad=True)
    out, routed = ours(x)
    expected = theirs(x)
    assert_close(out, expected, OPERATIONS)
    here, there = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, expected))
    assert_close(here, there, OPERATIONS)
    probabilities, _, chosen = ours.gate(x)
    assert_close(probabilities.sum(-1), torch.ones(2, 7), OPERATIONS)
    # Equations 17 to 20 of the report, term by term: scores of a token divided by their sum.
    scores = (x @ ours.gate.weight.T).sigmoid()
    share = torch.nn.functional.one_hot(chosen, 6).sum(2).float().mean(1) * 6 / 3
    mean = (scores / scores.sum(-1, keepdim=True)).mean(1)
    assert_close(routed.balance / 3, (share * mean).sum(1), OPERATIONS)


def test_padding_is_no_part_of_what_routers_tell() -> None:
    config = tiny(balance_weight=0.3)
    model = built(config).double().train()
    tokens, labels = batch(config)
    labels[:, 9:] = -100
    labels[0, 4] = -100  # a token without a label of its own, before others that have one
    cut, weight = model(tokens[:, :9], labels[:, :9])
    told = model.routed
    filled, same = model(tokens, labels)
    assert weight == same
    torch.testing.assert_close(filled, cut)
    assert model.routed is not None and told is not None
    torch.testing.assert_close(model.routed, told)
    model(tokens, torch.full_like(labels, -100))
    assert torch.equal(model.routed, torch.zeros_like(told)), "a batch without a label teaches nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_balance_is_load_balancing_loss_func_of_each_sequence_and_layer(dtype: torch.dtype) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(3, 20, 6, dtype=dtype, generator=torch.Generator().manual_seed(2))
    probabilities = logits.softmax(-1)
    counts = expert_counts(probabilities.topk(2).indices, 6)
    ours = sequence_balance(probabilities, counts, 2)
    theirs = torch.stack([load_balancing_loss_func((row,), 6, 2) for row in logits])
    assert_close(ours, theirs, OPERATIONS)  # theirs counts in fp32
    # Two ranks with half of each sequence: their parts add up.
    halves = [slice(0, 8), slice(8, 20)]
    parts = [sequence_balance(probabilities[:, half], counts, 2, lambda part: counts) for half in halves]
    assert_close(sum(parts), ours, OPERATIONS)


def test_an_even_load_gives_top_k_and_one_expert_for_all_gives_experts() -> None:
    even = torch.full((1, 6, 6), 1 / 6)
    assert sequence_balance(even, torch.full((1, 6), 2.0), 2).item() == pytest.approx(2)
    one = torch.nn.functional.one_hot(torch.zeros(1, 6, dtype=torch.int64), 6).float()
    assert sequence_balance(one, torch.tensor([[6.0, 0, 0, 0, 0, 0]]), 1).item() == pytest.approx(6)


def test_the_loss_does_not_depend_on_how_a_batch_is_cut() -> None:
    config = tiny(balance_weight=0.3)
    model = built(config).double().train()
    tokens, labels = batch(config)
    whole, weight = model(tokens, labels)
    rows = [model(tokens[i : i + 1], labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(sum(loss for loss, _ in rows), whole)
    assert sum(int(count) for _, count in rows) == int(weight)
    model.eval()
    assert whole > model(tokens, labels)[0], "evaluations count the cross-entropy alone"


def test_a_bias_chooses_and_does_not_weigh() -> None:
    config = tiny(balance="bias")
    model = built(config)
    router = routers(model)["layers.0.mlp.gate"]
    x = torch.randn(2, 5, 32)
    probabilities, _, chosen = router(x)
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[3] = 10.0
    _, biased, forced = router(x)
    assert (forced[..., 0] == 3).all() and not (chosen == 3).all()
    expected = probabilities.gather(-1, forced)
    assert_close(biased, expected / expected.sum(-1, keepdim=True), OPERATIONS)
    bias = torch.zeros(3)
    bias_step(bias, torch.tensor([5.0, 4.0, 3.0]), 0.1)
    assert bias.tolist() == pytest.approx([-0.1, 0.0, 0.1])


def test_shared_experts_dense_layers_and_unscaled_weights() -> None:
    model = built(tiny(shared_ffn=16, dense_layers=1, renormalise=False, layers=3))
    dense, sparse = model.layers[0], model.layers[1]
    assert isinstance(dense, RoutedLayer) and not isinstance(dense.mlp, MoE) and isinstance(sparse.mlp, MoE)
    x = torch.randn(2, 4, 32)
    probabilities, weights, chosen = sparse.mlp.gate(x)
    assert torch.equal(weights, probabilities.gather(-1, chosen))
    out, _ = sparse.mlp(x)
    experts = sparse.mlp.experts
    want = sparse.mlp.shared_experts(x)
    for row, at, slot in ((r, a, s) for r in range(2) for a in range(4) for s in range(2)):
        expert = int(chosen[row, at, slot])
        gate, up = experts.gate_up_proj[expert] @ x[row, at]
        value = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
        want[row, at] = want[row, at] + weights[row, at, slot] * value
    assert_close(out, want, OPERATIONS)


def test_experts_without_tokens_get_zero_gradients() -> None:
    gate_up, down = torch.randn(3, 8, 4, requires_grad=True), torch.randn(3, 4, 4, requires_grad=True)
    for counts in ([5, 0, 2], [0, 0, 0]):
        rows = torch.randn(sum(counts), 4, requires_grad=True)
        expert_products(rows, torch.tensor(counts), gate_up, down).sum().backward()
        assert gate_up.grad is not None and down.grad is not None
        assert not gate_up.grad[1].any()


def test_grouped_products_equal_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped products")
    generator = torch.Generator().manual_seed(4)
    rows, gate_up, down = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((9, 16), (3, 32, 16), (3, 16, 16))
    )
    counts = torch.tensor([4, 0, 5])
    assert not products.has_grouped_products(rows, gate_up, down), "on a CPU the loop is taken"
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(products, "has_grouped_products", lambda *tensors, grouped=grouped: grouped)
        out = expert_products(rows, counts, gate_up, down)
        gradients = torch.autograd.grad(out, (rows, gate_up, down), torch.ones_like(out))
        results.append((out, *gradients))
    for loop, kernel in zip(*results, strict=True):
        assert_close(kernel, loop, 40)  # products over 16 features, rounded to bf16 in between


def test_published_shapes_have_their_published_sizes() -> None:
    counts = {name: (size.parameters, size.active_parameters) for name, size in NAMED_SIZES.items()
              if isinstance(size, MoEConfig)}  # fmt: skip
    assert counts["mixtral-8x7b"] == (46_702_792_704, 12_879_925_248)
    assert counts["mixtral-8x22b"][0] == pytest.approx(140.6e9, rel=0.001)
    assert counts["deepseek-moe-16b"][0] == pytest.approx(16.38e9, rel=0.002)
    for name in ("moe-2m", "deepseek-moe-16b"):
        config = resolve_decoder(ModelSpec(name, hidden=32, heads=4, kv_heads=2, ffn=24, layers=3, vocab=61), 61, 16)
        model = build_model(ModelSpec(name, hidden=32, heads=4, kv_heads=2, ffn=24, layers=3, vocab=61), 61, 16, 1)
        assert isinstance(config, MoEConfig)
        assert sum(p.numel() for p in model.parameters()) == config.parameters
    with pytest.raises(ConfigError, match="has no experts"):
        resolve_decoder(ModelSpec("llama-1m", experts=4), 61, 16)
    with pytest.raises(ConfigError, match="9 experts per token of 8"):
        dataclasses.replace(NAMED_SIZES["mixtral-8x7b"], top_k=9)
