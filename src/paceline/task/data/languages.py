"""What stands around the texts of an encoder-decoder: special tokens, and the language of each where it knows many.

| model | a source is | a target says | its decoder reads first |
|---|---|---|---|
| T5, BART | what tokenizer.json puts around a text | the same | `decoder_start_token_id` |
| mBART-50 | language, text, end | language, text, end | the end |
| NLLB, M2M-100 | language, text, end | language, text, end | `decoder_start_token_id` |
| mBART (cc25) | text, end, language | text, end, language | the language |

So transformers' own tokenizers and `shift_tokens_right` have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError, suggestion
from paceline.task.data.sources.tokenizer import FileTokenizer

LANGUAGE_KINDS = ("mbart", "m2m_100")  # NLLB is an m2m_100
# Models whose targets have pieces of their own, or more than one language token, of which tokenizer.json says nothing.
OTHER_TARGETS = ("plbart", "nllb-moe", "marian", "fsmt", "seamless_m4t", "seamless_m4t_v2")
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
LAST = ("MBartTokenizer", "MBartTokenizerFast")  # tokenizers that write the language behind a text


@dataclass(frozen=True)
class Around:
    """The tokens before and behind the texts of one side."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def fitted(self, own: Sequence[int], most: int) -> list[int]:
        """Return a text's own tokens with those around them; of one that is too long the end is lost."""
        kept = own[: max(0, most - len(self.before) - len(self.after))]
        return [*self.before, *kept, *self.after][-most:]


@dataclass(frozen=True)
class Sides:
    """What stands around sources and around targets, and what a decoder reads first."""

    source: Around
    target: Around
    start: int


def sides_of(
    folder: Path, config: dict[str, Any], tokenizer: FileTokenizer, languages: tuple[str, str], end: int,
    examples: Sequence[str],
) -> Sides:  # fmt: skip
    """Return what stands around the texts of the model in a folder, such as the `examples`.

    `languages` are those of sources and targets, "" of none; `end` is the token that ends a text.

    Raises DataError where the model wants languages and has none, knows other ones, or none at all.
    """
    kind = config.get("model_type")
    if kind in OTHER_TARGETS:
        raise DataError(
            f"the tokenizer in {folder} writes targets otherwise than sources", f"it is of a {kind}: with pieces or"
            " languages of their own, of which tokenizer.json knows nothing",
            "a data set of your own, with the same entries",
        )  # fmt: skip
    if kind in LANGUAGE_KINDS:
        return _with_languages(folder, config, tokenizer, languages, end)
    if any(languages):
        raise DataError(
            f"source_language and target_language of a {kind}", "its texts do not say which language they are in",
            'leave them out; T5 is told by prefix = "translate English to German: "',
        )  # fmt: skip
    around = _of_post_processor(tokenizer, examples)
    return Sides(around, around, _start_of(folder, config))


def _with_languages(
    folder: Path, config: dict[str, Any], tokenizer: FileTokenizer, languages: tuple[str, str], end: int
) -> Sides:
    """Return what stands around the texts of a model of many languages, as its own tokenizer writes it."""
    source, target = map(_number, (tokenizer, tokenizer), languages, ("source", "target"))
    written, is_mbart = _read(folder / "tokenizer_config.json"), config.get("model_type") == "mbart"
    if is_mbart and not written.get("tokenizer_class"):
        raise DataError(
            f"{folder} does not say where its tokenizer writes a language",
            "mBART has it behind a text, mBART-50 before it, and no tokenizer_config.json says which it is",
            "the whole folder, as AutoTokenizer.from_pretrained(...).save_pretrained writes it",
        )  # fmt: skip
    is_last = written.get("tokenizer_class") in LAST if is_mbart else bool(written.get("legacy_behaviour"))
    of_source, of_target = (
        Around((), (end, each)) if is_last else Around((each,), (end,)) for each in (source, target)
    )
    # mBART's decoder reads first what a target says last.
    return Sides(of_source, of_target, of_target.after[-1] if is_mbart else _start_of(folder, config))


def _start_of(folder: Path, config: dict[str, Any]) -> int:
    """Return what a decoder reads first. Raises DataError where its config says nothing of it."""
    start = config.get("decoder_start_token_id")
    if isinstance(start, int):
        return start
    raise DataError(
        f"{folder}/config.json says nothing of how a target begins", "it has no decoder_start_token_id",
        "the folder of an encoder-decoder, such as T5 or BART",
    )  # fmt: skip


def _of_post_processor(tokenizer: FileTokenizer, examples: Sequence[str]) -> Around:
    """Return what a tokenizer.json puts around a text: seen on the first one that has tokens of its own."""
    for text in examples:
        if len(tokenizer.encode([text.encode()])[0]):
            return Around(*tokenizer.sides(text))
    return Around((), tuple(tokenizer.around))


def _number(tokenizer: FileTokenizer, language: str, side: str) -> int:
    """Return the token of a language, spelt as it is or as M2M-100 spells it."""
    tokens = tokenizer.tokens()
    for spelt in (language, f"__{language}__"):
        if language and spelt in tokens:
            return tokens[spelt]
    known = [token for token in tokens if LANGUAGE.fullmatch(token)]
    what = f"{side}_language = '{language}'" if language else f"{side}_language is not given"
    because = "no token is called so" if language else "this model's texts begin or end with their language"
    raise DataError(what, because, suggestion(language, known) if known else "the token of a language")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
