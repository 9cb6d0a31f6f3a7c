"""Tokenizers: bytes, BPE trained on the corpus, or a tokenizer.json. Each has an end-of-document token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError, MissingExtra
from paceline.spec.model_folder import TOKENIZER

Tokens = npt.NDArray[Any]  # one dimension of unsigned integers

OWN = ("bytes", "bpe")  # of Paceline: `task.data.tokenizer` names these, or the file of another one
LEARNT = "learnt:"  # before the path of a tokenizer.json that "bpe" has learnt from other texts; no spec has it
BYTES_END = 256
BPE_END = "<|endoftext|>"
BPE_TRAIN_BYTES = 256 * 2**20  # merges learned from more text hardly differ, and training takes 5 MB/s
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|endofdoc|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>",
              "<|eot_id|>", "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>", "[SEP]", "<sep>")  # fmt: skip
# Special tokens that say so by other words, such as Cohere's <EOS_TOKEN>; where none of those above is there.
SAYS_END = re.compile(
    r"[\W_]*(eos|eod|eot|end|end_?of_?(text|doc|document|sentence|turn))(_?token)?[\W_]*", re.IGNORECASE
)
KNOWN_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|endoftext|>", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """Text to token ids and back. Ids lie in 0..vocab-1; `identity` is a hash of whatever decides the ids.

    `opening` are the tokens that a document begins with. The end-of-document token is none of them: it ends the
    document before, where it stands anyway.
    """

    name: str
    vocab: int
    end_of_document: int
    opening: tuple[int, ...]
    identity: str

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each UTF-8 text, without the opening and the end-of-document token."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of the ids; end-of-document tokens and ids past the vocabulary give nothing."""
        ...

    def to_json(self) -> str:
        """Return what `from_json` restores the tokenizer from."""
        ...


class ByteTokenizer:
    """The 256 byte values as tokens, and 256 as the end of a document."""

    name, vocab, end_of_document, identity = "bytes", 257, BYTES_END, "bytes-1"
    opening: tuple[int, ...] = ()

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return each text's bytes."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of the ids; bytes that make no character become U+FFFD."""
        values = np.asarray(ids).reshape(-1)
        return values[(values >= 0) & (values < BYTES_END)].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return the mark of this tokenizer."""
        return json.dumps({"paceline": self.name})


def _special(tokenizer: Any) -> list[str]:
    """Return the special tokens of a tokenizer of the package."""
    return [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def _shown(names: Sequence[str]) -> str:
    return f" (it has {' '.join(names[:8])})" if names else ""


class FileTokenizer:
    """A tokenizer in the format of the `tokenizers` package (tokenizer.json). Needs the extra 'bpe'."""

    def __init__(self, text: str, name: str) -> None:
        """Read the JSON `text`. Raises DataError where it is no tokenizer or names no end of document."""
        package = _package(f"the tokenizer {name}")
        try:
            self._tokenizer = package.Tokenizer.from_str(text)
        except Exception as error:  # the package raises nothing more precise
            raise DataError(
                f"{name} is not a tokenizer", str(error), "name a tokenizer.json of the package 'tokenizers'"
            ) from error
        # A document that spells out a special token must not end itself.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = name
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(tokens.values(), default=0) + 1
        special = _special(self._tokenizer)
        ends = [token for token in KNOWN_ENDS if token in tokens]
        ends += [token for token in special if SAYS_END.fullmatch(token)]
        if not ends:
            raise DataError(
                f"{name} has no end-of-document token",
                f"none of {' '.join(KNOWN_ENDS)} is in its vocabulary",
                f"add one to its added_tokens, or call that so which ends a document{_shown(special)}",
            )
        self.end_of_document: int = tokens[ends[0]]
        pads = [token for token in KNOWN_PADS if token in tokens]
        self.pad: int = tokens[pads[0]] if pads else 0
        # What its post-processor puts around a text, such as [CLS] and [SEP].
        self.around: list[int] = self._tokenizer.encode("", add_special_tokens=True).ids
        before = self.sides("a")[0]
        self.opening = () if before == (self.end_of_document,) else before
        self.identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._text = text

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each UTF-8 text, without the tokens that its post-processor would add."""
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_around(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each UTF-8 text with the tokens that its post-processor puts around it."""
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=True)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def sides(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what its post-processor puts before and behind a text: [CLS] and [SEP]; nothing where it is not seen.

        It is not where the text has no tokens of its own.
        """
        own, around = (encode([text.encode()])[0].tolist() for encode in (self.encode, self.encode_around))
        places = (at for at in range(len(around) - len(own) + 1) if own and around[at : at + len(own)] == own)
        before = next(places, len(around))
        return (tuple(around[:before]), tuple(around[before + len(own) :])) if before < len(around) else ((), ())

    def behind(self) -> int:
        """Return how many tokens its post-processor puts behind a text: [SEP] is one."""
        return len(self.sides("a")[1])

    def encode_special(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the ids of each UTF-8 text in which special tokens that are spelt out are meant."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(texts)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_placed(self, texts: Sequence[str]) -> list[tuple[Tokens, Tokens, Tokens]]:
        """Return the ids of each text as `encode_special` does, and the characters at which each begins and ends."""
        self._tokenizer.encode_special_tokens = False
        try:
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        places = [np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) for encoding in encodings]
        return [(np.asarray(encoding.ids, dtype=np.uint32), place[:, 0], place[:, 1])
                for encoding, place in zip(encodings, places, strict=True)]  # fmt: skip

    def tokens(self) -> dict[str, int]:
        """Return the number of each token."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def token(self, number: int) -> str:
        """Return how a token is spelt."""
        return str(self._tokenizer.id_to_token(number))

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of the ids, without end-of-document tokens."""
        values = np.asarray(ids).reshape(-1)
        kept = values[(values >= 0) & (values < self.vocab) & (values != self.end_of_document)]
        return str(self._tokenizer.decode(kept.tolist(), skip_special_tokens=False))

    def to_json(self) -> str:
        """Return the tokenizer.json."""
        return self._text


def train_bpe(texts: Iterable[bytes], vocab: int) -> FileTokenizer:
    """Return a byte-level BPE tokenizer of at most `vocab` tokens, the end of document included.

    Learns from the first 256 MiB; the same texts give the same tokenizer. A small corpus may have fewer merges
    to offer than asked for, so read the tokenizer's own `vocab`. Needs the extra 'bpe'.
    """
    package = _package("training a BPE tokenizer")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BPE_END],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, BPE_TRAIN_BYTES), trainer)
    return FileTokenizer(tokenizer.to_str(), "bpe")


def opened(tokenizer: Tokenizer, ids: Tokens) -> Tokens:
    """Return the ids of a document with the opening before them."""
    return np.concatenate([np.asarray(tokenizer.opening, dtype=np.uint32), ids]) if tokenizer.opening else ids


def is_own(tokenizer: str) -> bool:
    """Return whether `task.data.tokenizer` is one of Paceline's: each text then ends with the end-of-document token."""
    return tokenizer in OWN or tokenizer.startswith(LEARNT)


def load_tokenizer(path: str) -> FileTokenizer:
    """Return the tokenizer of a tokenizer.json, or of a folder that holds one. Raises DataError where it cannot."""
    file = _file_of(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"tokenizer '{path}' is not there", f"no file {file.absolute()}", "'bytes', 'bpe' or a tokenizer.json"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"tokenizer '{path}' is not UTF-8 text", str(error), "name a tokenizer.json") from error
    except OSError as error:
        raise DataError(
            f"tokenizer '{path}' cannot be read", error.strerror or str(error), "check its permissions"
        ) from error
    return FileTokenizer(text, "bpe" if path.startswith(LEARNT) else file.name)


def _file_of(path: str) -> Path:
    file = Path(path.removeprefix(LEARNT)).expanduser()
    return file / TOKENIZER if file.is_dir() else file


def special_tokens_of(path: str) -> list[str]:
    """Return the special tokens of a tokenizer.json, or of a folder that holds one; none where there is no such file.

    The package that reads all of it is not needed.
    """
    try:
        found = json.loads(_file_of(path).read_text(encoding="utf-8"))
        return [str(each["content"]) for each in found["added_tokens"] if each.get("special")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # `load_tokenizer` says what is wrong with it


def special_text(tokenizer: Tokenizer) -> str:
    """Return which special tokens a tokenizer is used with, for people."""
    if not isinstance(tokenizer, FileTokenizer):
        return f"end of document {tokenizer.end_of_document}"
    end = tokenizer.token(tokenizer.end_of_document)
    around, opening = (" ".join(map(tokenizer.token, ids)) for ids in (tokenizer.around, tokenizer.opening))
    told = f"end of document {end}" + (f", a document begins with {opening}" if opening else "")
    return told + (f", around a text {around}" if around and around != opening else "")


def from_json(text: str, name: str) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote."""
    byte_tokenizer = ByteTokenizer()
    return byte_tokenizer if text == byte_tokenizer.to_json() else FileTokenizer(text, name)


def _first(texts: Iterable[bytes], limit_bytes: int) -> Iterator[str]:
    for text in texts:
        if limit_bytes <= 0:
            return
        limit_bytes -= len(text)
        yield text.decode()


def _package(purpose: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra("tokenizers", "bpe", purpose) from error
    return tokenizers
