"""Sources: what a batch holds, what positions decide, how data given in any form become sources."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, DataError
from paceline.spec.task import DataSpec
from paceline.task.data import source as source_module
from paceline.task.data.facts import data_facts
from paceline.task.data.order.permutation import keyed, sample_ids
from paceline.task.data.protocol import SOURCE, Source, is_source
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.source import open_sources
from paceline.task.data.sources.digits import open_digits
from paceline.task.data.sources.mapped import MapSource
from paceline.task.data.unigram import token_counts, unigram_loss


@pytest.fixture
def text_spec(tmp_path: Path) -> DataSpec:
    generator = random.Random(1)
    for number in range(40):
        words = " ".join(generator.choice(["one", "two", "three", "four"]) for _ in range(50 + number))
        (tmp_path / f"{number:02}.txt").write_text(words)
    return DataSpec(str(tmp_path), seq_len=32, cache_dir=str(tmp_path / ".cache"), validation_fraction=0.2)


class Noisy:
    """A data set whose samples are drawn with every generator that augmentation uses."""

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(3), "y": np.random.rand(), "z": random.random(), "index": index}


# ---- text ----


def test_windows_cover_the_split_once_and_labels_follow(text_spec: DataSpec) -> None:
    train, validation = open_sources(text_spec, 7)
    assert isinstance(train, TokenSource) and isinstance(validation, TokenSource)
    stored = torch.from_numpy(train.split.open().astype(np.int64))
    batch = train.read(np.arange(train.samples))
    assert batch["tokens"].shape == batch["labels"].shape == (train.samples, 32)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    covered = train.samples * 32
    assert torch.equal(batch["tokens"].flatten(), stored[:covered])
    assert torch.equal(batch["labels"].flatten(), stored[1 : covered + 1])
    assert len(stored) - covered <= 32
    assert (train.unit, train.items_per_sample, train.vocab) == ("tokens", 32, 257)


def test_a_batch_does_not_depend_on_how_it_is_cut(text_spec: DataSpec) -> None:
    train, _ = open_sources(text_spec, 7)
    positions = np.arange(100, 160)
    ids = sample_ids(7, positions, train.samples)
    whole = train.read(ids, positions)["tokens"]
    parts = [train.read(ids[a : a + 7], positions[a : a + 7])["tokens"] for a in range(0, 60, 7)]
    assert torch.equal(torch.cat(parts), whole)
    assert train.read(ids[:0])["tokens"].shape == (0, 32)
    with pytest.raises(IndexError):
        train.read(np.array([train.samples]))


def test_a_source_travels_to_another_process_without_its_tokens(text_spec: DataSpec) -> None:
    train, _ = open_sources(text_spec, 7)
    sent = pickle.dumps(train)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.fingerprint == train.fingerprint
    assert torch.equal(again.read(np.array([3]))["labels"], train.read(np.array([3]))["labels"])


def test_the_fingerprint_is_of_the_content(text_spec: DataSpec, tmp_path: Path) -> None:
    from dataclasses import replace

    train, validation = open_sources(text_spec, 7)
    assert validation is not None and train.fingerprint != validation.fingerprint
    elsewhere = replace(text_spec, cache_dir=str(tmp_path / ".other"))
    assert open_sources(elsewhere, 8)[0].fingerprint == train.fingerprint
    assert open_sources(replace(text_spec, seq_len=16), 7)[0].fingerprint != train.fingerprint
    assert open_sources(replace(text_spec, validation_fraction=0.0), 7)[0].fingerprint != train.fingerprint


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"6 tokens in 1 document; a sample needs 65"):
        open_sources(DataSpec(str(tmp_path / "a.txt"), seq_len=64, cache_dir=str(tmp_path / ".cache")), 7)
    train, validation = open_sources(
        DataSpec(str(tmp_path / "a.txt"), seq_len=5, cache_dir=str(tmp_path / ".cache")), 7
    )
    assert (train.samples, validation) == (1, None)


# ---- digits ----


def test_digits() -> None:
    pytest.importorskip("sklearn")
    train, validation = open_digits(0.2)
    assert validation is not None and train.samples + validation.samples == 1797
    assert 0.15 < validation.samples / 1797 < 0.25
    batch = train.read(np.arange(5))
    assert batch["images"].shape == (5, 1, 8, 8) and batch["images"].dtype == torch.float32
    assert float(batch["images"].min()) == 0 and float(batch["images"].max()) == 1
    assert batch["labels"].dtype == torch.int64 and set(batch["labels"].tolist()) <= set(range(10))
    assert open_digits(0.0)[1] is None
    # The labels stay with their images: a nearest-mean classifier is right far above chance.
    means = np.stack([train.images[train.labels == digit].mean(0) for digit in range(10)])
    distance = ((validation.images[:, None] - means[None]) ** 2).sum((2, 3, 4))
    assert (distance.argmin(1) == validation.labels).mean() > 0.8


# ---- a user's data set ----


def test_augmentation_is_a_function_of_the_position() -> None:
    source = MapSource(Noisy(), seed=3)
    positions = np.arange(200, 230)
    ids = sample_ids(3, positions, source.samples)
    whole = source.read(ids, positions)
    torch.manual_seed(99)
    for start in range(0, 30, 4):
        part = source.read(ids[start : start + 4], positions[start : start + 4])
        assert all(torch.equal(part[name], whole[name][start : start + 4]) for name in whole)
    assert len(set(whole["z"].tolist())) == 30
    later = source.read(ids, positions + source.samples)
    other = MapSource(Noisy(), seed=4).read(ids, positions)
    for name in ("x", "y", "z"):
        assert not torch.equal(later[name], whole[name]) and not torch.equal(other[name], whole[name])
    assert torch.equal(source.read(ids)["x"], source.read(ids, ids)["x"])


class DrawsLate:
    """Some rows draw, some ask for torch's seed, and one cannot be read unless it draws what its seed gives."""

    fingerprint = "late"

    def __init__(self, late: int) -> None:
        self.late, self.read = late, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, float]:
        self.read += 1
        drawn = 0.0
        if index >= self.late:
            drawn = random.random() if index % 2 else float(np.random.randn())
        if index == 63 and self.late == 63 and drawn != SEEDED:
            raise ValueError("another number was wanted")
        return {"seed": float(torch.initial_seed() % 2**20), "drawn": drawn, "index": float(index)}


def _drawn_alone(seed: int, index: int) -> float:
    random.seed(int(keyed(seed, np.array([index], dtype=np.uint64))[0]))
    return random.random()


SEEDED = _drawn_alone(5, 63)


@pytest.mark.parametrize("drawn_before", [0, 1, 2])  # after one normal number numpy keeps another
@pytest.mark.parametrize("late", [0, 40, 63, 64])
def test_rows_that_draw_late_are_what_they_are_alone(late: int, drawn_before: int) -> None:
    ids = np.arange(64)
    alone = [MapSource(DrawsLate(late), seed=5).read(ids[at : at + 1]) for at in range(64)]
    source = MapSource(DrawsLate(late), seed=5)
    for start in range(0, 64, 8):
        np.random.randn(drawn_before)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        part = source.read(ids[start : start + 8])
        for name in part:
            expected = torch.cat([each[name] for each in alone[start : start + 8]])
            assert torch.equal(part[name], expected), name
        assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[2])
        own, kept = np.random.get_state(), states[1]
        assert np.array_equal(own[1], kept[1]) and own[2:] == kept[2:]
    assert source.dataset.read <= 65 + 8 * (late < 64), "one row is, and one batch where rows are seen to draw"


class ReadsState:
    """Rows that follow from where a global generator stands, and draw nothing from it."""

    fingerprint = "reads state"

    def __init__(self, of_numpy: bool) -> None:
        self.of_numpy = of_numpy

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        state = np.random.get_state()[1] if self.of_numpy else random.getstate()[1]
        return float(np.random.default_rng(int(state[5]) + index).random())


@pytest.mark.parametrize("of_numpy", [True, False])
def test_rows_that_read_a_generators_state_are_a_function_of_the_position_too(of_numpy: bool) -> None:
    found = []
    for ambient, cut in ((1, 16), (2, 5)):
        random.seed(ambient)
        np.random.seed(ambient)
        source = MapSource(ReadsState(of_numpy), seed=5)
        parts = [source.read(np.arange(at, min(16, at + cut)), 100 + np.arange(at, min(16, at + cut)))
                 for at in range(0, 16, cut)]  # fmt: skip
        found.append(torch.cat(parts))
    assert torch.equal(found[0], found[1]) and len(set(found[0].tolist())) == 16


class Sparse:
    """Rows that show no bytes of theirs, which a collate makes dense."""

    fingerprint = "sparse"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.eye(3) * index).to_sparse()


def test_rows_that_show_no_bytes_are_read() -> None:
    source = MapSource(Sparse(), seed=5, collate=lambda rows: torch.stack([row.to_dense() for row in rows]))
    assert torch.equal(source.read(np.arange(4)), torch.stack([torch.eye(3) * index for index in range(4)]))


def test_the_global_generators_are_set_back_even_after_a_failure() -> None:
    class Failing(Noisy):
        fingerprint = "x"

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 7:
                raise KeyError("corrupt image")
            return super().__getitem__(index)

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    source = MapSource(Failing(), seed=1)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    source.read(np.arange(5))
    with pytest.raises(DataError, match=r"sample 7 of Failing cannot be read\n.*KeyError: 'corrupt image'"):
        source.read(np.arange(10))
    assert draw() == expected


def test_data_sets_that_cannot_be_used() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    class Ragged(Noisy):
        fingerprint = "x"

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1)

    with pytest.raises(DataError, match="__len__"):
        MapSource(Stream(), 1)
    with pytest.raises(DataError, match="not a map-style data set"):
        open_sources(3, 1)
    with pytest.raises(DataError, match="is empty"):
        MapSource([], 1)
    with pytest.raises(DataError, match=r"do not make a batch\n  because  sample 1 is \[2\] where sample 0 is \[1\]; "):
        MapSource(Ragged(), 1).read(np.arange(3))
    tokens = [{"ids": [7] * length, "of": (1, 2.0)} for length in (500, 1200)]  # as tokenizers give them
    told = r"because  sample 1 is {ids: 1,200 x int, of: \(int, float\)} where sample 0 is {ids: 500 x int, of: "
    with pytest.raises(DataError, match=told):
        MapSource(tokens, 1).read(np.arange(2))


@pytest.mark.parametrize(
    ("lengths", "because"),
    [
        ([1.0, float("nan"), 2.0], r"lengths\[1\] is nan"),
        ([1, 2, -3], r"lengths\[2\] is -3"),
        ([0, 0, 0], "all of them are 0"),
        ([1j, 2j, 3j], "lengths"),
        ([True, False, True], "lengths"),
        ([1, 2], "there are 3 samples"),
    ],
)
def test_lengths_that_are_none_are_told(lengths: list[Any], because: str) -> None:
    """Batches of a number of tokens would never be full of samples without a length, or hold any number of them."""
    samples = [torch.zeros(2)] * 3

    class Declares(list[torch.Tensor]):
        pass

    dataset: Any = Declares(samples)
    dataset.lengths = lengths
    with pytest.raises(DataError, match=because):
        MapSource(dataset, 1)
    dataset.lengths = [0, 2.0, 5]
    assert MapSource(dataset, 1).lengths.tolist() == [0, 2, 5]  # type: ignore[union-attr]


def test_a_data_set_that_gives_lists_of_samples_alone_is_read_one_by_one() -> None:
    class Lists(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitems__(self, ids: list[int]) -> list[dict[str, Any]]:
            return [{"x": np.full(2, index, np.float32), "noise": random.random()} for index in ids]

    source = open_sources(Lists(), 7)[0]
    batch = source.read(np.array([3, 1]), np.array([10, 11]))
    assert batch["x"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["noise"][1] == source.read(np.array([1]), np.array([11]))["noise"][0]


def test_a_data_set_may_declare_what_it_is() -> None:
    class Sequences(Noisy):
        items_per_sample, unit, vocab, fingerprint = 16, "tokens", 100, "mine"

    source = MapSource(Sequences(), 1)
    assert (source.items_per_sample, source.unit, source.vocab) == (16, "tokens", 100)
    assert source.fingerprint == "mine"
    Sequences.unit = "token"
    with pytest.raises(DataError, match="did you mean 'tokens'"):
        MapSource(Sequences(), 1)

    class Foreign(Noisy):
        vocab = {"a": 1}  # noqa: RUF012 (as text libraries have it)

    assert MapSource(Foreign(), 1).vocab is None


def test_fingerprints_follow_the_content() -> None:
    one, same, other = (MapSource(torch.arange(9.0) + offset, 1).fingerprint for offset in (0, 0, 1))
    assert one == same != other
    assert MapSource(list(range(8)), 1).fingerprint != MapSource(list(range(9)), 1).fingerprint
    assert MapSource(Noisy(), 1).fingerprint == MapSource(Noisy(), 1).fingerprint


class OwnBatch:
    """A batch of a class that says nothing of what it holds."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows, self.whole = torch.stack(rows), self


def test_batches_of_a_class_of_ones_own_have_the_fingerprint_of_what_they_hold() -> None:
    sets = [torch.arange(9.0) + offset for offset in (0, 0, 1)]
    one, same, other = (MapSource(each, 1, OwnBatch).fingerprint for each in sets)
    assert one == same != other


def test_objects_and_pairs() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    train, validation = open_sources((data, data), 1)
    assert validation is not None and train.samples == 10
    x, y = train.read(np.array([4, 2]))
    assert x.tolist() == [4.0, 2.0] and y.tolist() == [4, 2]
    assert open_sources((data, None), 1)[1] is None and open_sources(data, 1)[1] is None
    assert open_sources(train, 1)[0] is train
    with pytest.raises(DataError, match="a tuple of 3"):
        open_sources((data, data, data), 1)


FACTORIES = """
from paceline.errors import DataError
def one(length=4):
    return list(range(length))
def pair():
    return [1, 2, 3], [4]
def broken():
    raise OSError("no such bucket")
def refusing():
    raise DataError("mine", "as it is", "change it")
ready = [1, 2]
"""


class Squares:
    """A source that a user wrote: sample i is (i + shift) squared."""

    samples, items_per_sample, unit, vocab = 5, 1, "samples", None

    def __init__(self, shift: int) -> None:
        self.shift, self.fingerprint = shift, f"squares-{shift}"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> Any:
        return {"x": torch.from_numpy((ids + self.shift) ** 2)}


class OwnData:
    """Data that open their own sources, with a held-out one."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def open_sources(self, seed: int) -> tuple[Squares, Squares]:
        return Squares(self.shift + seed), Squares(self.shift - 1)


def test_data_may_open_their_own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = open_sources(OwnData(2), seed=7)
    assert isinstance(train, Squares) and isinstance(held_out, Squares)
    assert train.read(np.array([0, 3]))["x"].tolist() == [81, 144] and held_out.shift == 1
    assert data_facts(OwnData(2)).fingerprint == "squares-2"
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    named = DataSpec(source=f"{Path(__file__).stem}:OwnData", arguments={"shift": 4})
    assert open_sources(named, seed=7)[0].fingerprint == "squares-11"
    with pytest.raises(ConfigError, match="collate with a OwnData"):
        open_sources(dataclasses.replace(named, collate="json:dumps"), seed=7)


class PassesOn:
    """A source that has nothing of its own but a name for a part of another's content."""

    def __init__(self, other: object) -> None:
        self.other, self.fingerprint = other, "a part"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


def test_what_passes_on_a_source_is_one_and_other_data_are_not() -> None:
    """isinstance() of a protocol sees what `__getattr__` gives in Python 3.11 and not in 3.12."""
    source = PassesOn(Squares(1))
    assert open_sources(source, seed=7)[0] is source
    assert {name for name in (*Source.__annotations__, *vars(Source)) if not name.startswith("_")} == set(SOURCE)
    for name in SOURCE:
        lacking = type("Lacking", (), {each: None for each in SOURCE if each != name})()
        assert not is_source(lacking), name


def test_a_new_name_is_a_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = lambda data, seed, say: (Squares(seed), None)  # noqa: E731
    monkeypatch.setitem(source_module.OPENERS, "squares", opened)
    assert open_sources(DataSpec(source="squares"), seed=3)[0].fingerprint == "squares-3"
    assert not source_module.is_text("squares") and source_module.is_text("stdlib")


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_data_sets.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def opened(name: str, **arguments: Any) -> tuple[Source, Source | None]:
        return open_sources(DataSpec(f"some_data_sets:{name}", arguments=arguments), 1)

    assert opened("one", length=6)[0].samples == 6 and opened("one")[1] is None
    train, validation = opened("pair")
    assert validation is not None and (train.samples, validation.samples) == (3, 1)
    assert opened("ready")[0].samples == 2
    with pytest.raises(DataError, match="OSError: no such bucket"):
        opened("broken")
    with pytest.raises(DataError, match="unexpected keyword argument"):
        opened("one", size=3)
    with pytest.raises(DataError, match="mine"):
        opened("refusing")
    with pytest.raises(ConfigError, match="some_data_sets"):
        opened("absent")
    with pytest.raises(ConfigError, match="no module"):
        open_sources(DataSpec("no_such_module_at_all:x"), 1)


# ---- facts and the unigram bar ----


def test_facts_of_text(text_spec: DataSpec) -> None:
    facts = data_facts(text_spec)
    train, validation = open_sources(text_spec, 7)
    assert validation is not None
    assert (facts.samples, facts.validation_samples) == (train.samples, validation.samples)
    assert (facts.items_per_sample, facts.unit, facts.vocab) == (32, "tokens", 257)
    assert facts.documents == 40 and facts.fingerprint == train.fingerprint and facts.notes == ()
    assert facts.bytes == sum(path.stat().st_size for path in Path(text_spec.source).glob("*.txt"))
    assert facts.description == f"{facts.bytes / 1000:.3g} kB of text in {Path(text_spec.source).name}"


def test_facts_say_what_is_unexpected(text_spec: DataSpec) -> None:
    from dataclasses import replace

    (shown,) = data_facts(replace(text_spec, validation_fraction=1e-9, seq_len=900)).shown
    assert "none of it is held out" in shown and "a sample needs 901" in shown
    (note,) = data_facts(replace(text_spec, tokenizer="bpe", vocab=4096)).notes
    assert "fewer than vocab = 4,096" in note


def test_a_text_of_one_document_says_that_nothing_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a line of text\n" * 40)
    one = DataSpec(source=str(tmp_path / "one.txt"), seq_len=16)
    assert "one document" in data_facts(one).shown[0]
    assert data_facts(DataSpec(source=one.source, seq_len=16, validation_fraction=0.0)).shown == ()
    (tmp_path / "two.txt").write_text("another line of text\n" * 40)
    assert data_facts(DataSpec(source=str(tmp_path), seq_len=16)).shown == ()


def test_facts_of_other_data() -> None:
    pytest.importorskip("sklearn")
    digits = data_facts(DataSpec("digits"))
    assert digits.description == "1,797 handwritten digits"
    assert (digits.unit, digits.items_per_sample, digits.vocab, digits.bytes) == ("samples", 1, None, 0)
    assert data_facts(Noisy()).description == "50 samples of Noisy"


def test_planning_on_text_and_digits_needs_no_torch(text_spec: DataSpec) -> None:
    code = (
        "import sys\nfrom paceline.task.data.facts import data_facts\nfrom paceline.spec.task import DataSpec\n"
        "for spec in (DataSpec(sys.argv[1], cache_dir=sys.argv[2], seq_len=8), DataSpec('digits')):\n"
        "    assert data_facts(spec).samples > 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, text_spec.source, text_spec.cache_dir], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_unigram_loss(text_spec: DataSpec) -> None:
    train, validation = open_sources(text_spec, 7)
    assert isinstance(train, TokenSource) and isinstance(validation, TokenSource)
    counts = np.bincount(train.split.open(), minlength=257) + 1.0
    assert np.array_equal(token_counts(train.split.open(), 257) + 1, counts)
    negative_log = -np.log(counts / counts.sum())
    for samples in (None, 2):
        ids = np.arange(samples or validation.samples)
        by_hand = float(negative_log[validation.read(ids)["labels"].numpy()].mean())
        assert math.isclose(unigram_loss(train, validation, None if samples is None else ids), by_hand, rel_tol=1e-12)
    assert 1.5 < unigram_loss(train, validation) < math.log(257)


def test_documents_that_do_not_mix_are_numbered(text_spec: DataSpec) -> None:
    mixed, _ = open_sources(text_spec, 7)
    apart, held_out = open_sources(dataclasses.replace(text_spec, cross_documents=False), 7)
    assert isinstance(apart, TokenSource) and held_out is not None and "documents" in held_out.read(np.arange(1))
    ids = np.array([3, 0, apart.samples - 1])
    batch = pickle.loads(pickle.dumps(apart)).read(ids)
    assert "documents" not in mixed.read(ids)
    assert all(batch[name].equal(entry) for name, entry in mixed.read(ids).items())
    end = int(apart.split.open()[-1])  # every document ends with the same token, which opens the next one
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        begins = (documents[1:] != documents[:-1]).nonzero().flatten() + 1
        assert begins.tolist() == [place for place in range(1, 32) if int(tokens[place]) == end]
