"""The tasks of the table of proven layouts: one for each family of models, on a small corpus that is written anew."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.spec.load import Spec, parse_spec
from paceline.spec.task import ModelSpec

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
SPEC = """
[task]
name = "{name}"
global_batch = "64 samples"
stop = "50 steps"
data = {{ source = "{source}", tokenizer = "bytes", seq_len = {seq_len}, cache_dir = "{cache}" }}

[cluster]
device = "cpu"
devices = 2
probe = false
"""


@dataclass(frozen=True)
class Family:
    """A family of models, how many ranks all its layouts are proven on, and layouts of more ranks beside those."""

    title: str
    what: str
    model: ModelSpec
    largest: int
    also: tuple[str, ...] = ()
    seq_len: int = 24
    source: str = ""  # empty: a corpus of text


def _hugging_face(kind: str, **changes: Any) -> Family:
    named = ", ".join(f"`{key}={value}`" for key, value in changes.items())
    return Family(
        f"Hugging Face {kind}",
        f"`{kind}ForCausalLM` from its config alone{f', with {named}' if named else ''}: 5 layers, width 48, 8 heads of"
        " which 4 hold keys and values. Its rules are read from the config.",
        ModelSpec("proof_huggingface:from_config", arguments={"kind": kind, **changes}),
        largest=4,
        also=THREE_AXES,
    )


THREE_AXES = ("dp_shard=2,tp=2,pp=2", "dp_replicate=2,tp=2,pp=2", "dp_replicate=2,dp_shard=2,tp=2")
# Samples of 1680 tokens can be shared by any number of ranks up to 8, and by products of such numbers.
FAMILIES = {
    "decoder": Family(
        "Decoder",
        "`llama-3b`: Llama 3.2's shape with three query heads per key/value head and tied embeddings, as its twin.",
        ModelSpec("llama-3b"),
        largest=8,
        seq_len=1680,
    ),
    "moe": Family(
        "Mixture of experts",
        "`mixtral-8x22b`: eight experts per layer, two per token, six query heads per key/value head, as its twin.",
        ModelSpec("mixtral-8x22b"),
        largest=8,
        seq_len=1680,
    ),
    "vision": Family(
        "Vision",
        "`examples/digits_model.py` on handwritten digits: a residual network of plain modules, without rules.",
        ModelSpec("digits_model:build", arguments={"width": 24, "depth": 3}),
        largest=8,
        source="digits",
    ),
    "rules": Family(
        "A module with rules",
        "`docs/scripts/proof_models.py`: a language model of a user's own with a dozen lines of rules, biases, layer"
        " norms, dropout and positions; 5 layers, width 48, 8 heads.",
        ModelSpec("proof_models:with_rules"),
        largest=4,
        also=(*THREE_AXES, "cp=2,tp=2,pp=2", "dp_shard=2,cp=2,tp=2"),
    ),
    "qwen3": _hugging_face("Qwen3", tie_word_embeddings=True),
    "mistral": _hugging_face("Mistral", sliding_window=9),
    "gemma2": _hugging_face("Gemma2", sliding_window=9, query_pre_attn_scalar=6),
}


def spec_of(family: Family, folder: Path) -> Spec:
    """Return the family's spec; its corpus and the cache of it are in `folder`."""
    make_importable()
    text = SPEC.format(
        name=family.title, source=family.source or write_corpus(folder), seq_len=family.seq_len, cache=folder / "cache"
    )
    spec = parse_spec(text)
    return dataclasses.replace(spec, task=dataclasses.replace(spec.task, model=family.model))


def make_importable() -> None:
    """Let this process and those it starts import the models of this folder and of the examples."""
    paths = [str(HERE), str(EXAMPLES)]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*(p for p in paths if p not in known), *known]))


def write_corpus(folder: Path) -> Path:
    """Write a few dozen small documents with something to learn in them and return their folder."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(60):
        sums = (f"{number * step % 97} plus {step} is {number * step % 97 + step}." for step in range(120))
        (corpus / f"{number:02d}.txt").write_text(" ".join(sums))
    return corpus
