"""What a task leaves open and the data decide: whether the data are a table, what the labels are, objective and head.

A task is settled before it is planned, and again wherever one comes in: a settled task settles to itself. Each decision
says what was chosen and because of what.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, DamagedData
from paceline.spec.adapt.preference import DPO
from paceline.spec.import_paths import is_import_path, scheme_of
from paceline.spec.load import Spec
from paceline.spec.model_folder import THEIRS, TOKENIZER, folder_of, tokenizer_of
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.source import open_sources
from paceline.task.data.sources.files import NAMED_SOURCES, kind_of, list_files
from paceline.task.data.sources.named import kind_of_source
from paceline.task.data.sources.tables.labels import check_classes
from paceline.task.data.sources.tables.listing import TABLE_KINDS, inner_path, list_table
from paceline.task.head import (
    PAIRS,
    PREPROCESSOR,
    SEQ2SEQ,
    check_next_token,
    new_head_of,
    pixels_of,
    with_head,
    with_image_head,
)
from paceline.task.models.sizes import is_factory
from paceline.task.profile.limits import REFERENCED
from paceline.units import Amount

if TYPE_CHECKING:
    from paceline.spec.journal.kinds import DecisionRecord
    from paceline.task.data.sources.cache import Say
    from paceline.task.data.sources.tables.store import TextTable

LABEL_OBJECTIVES = ("classification", "regression", "multi_label")
POOLED = "paceline.task.models.pooled:pooled_decoder"
SHAPE_OPTIONS = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")  # of task.model, that a head leaves alone
ROWS = Amount(32, "samples")  # of a global batch of labelled texts, where the task does not say
ANSWERS = "paceline.task.data.pairs:preference_pairs"
PREFERENCES = {"chosen", "rejected"}  # columns of pairs, which have an objective of their own


@dataclass(frozen=True)
class Settled:
    """A spec that leaves nothing open that its data decide, and what was decided."""

    spec: Spec
    decisions: tuple[DecisionRecord, ...] = ()


def settle(spec: Spec, say: Say | None = None) -> Settled:
    """Return the spec with what its data decide. Tokenises a table that is not in the cache.

    Raises ConfigError where the task contradicts its data, and the errors of reading them.
    """
    task = spec.task
    if task.objective == DPO:
        return with_copy(spec)
    if not isinstance(task.data, DataSpec):
        return Settled(spec)
    decided = _Decided(task)
    if task.data.mix or not _settle_source(decided):
        _refuse_labels(task)
        check_next_token(task, of_text=_is_text(task.data))
        _refuse_other_pairs(task)
        _settle_image_head(decided)
        return _settled(spec, decided)
    _refuse_pairs(task)
    from paceline.task.data.sources.tables.store import open_table  # of tables alone, and their readers take a while

    _settle_labels_asked(decided)
    table = open_table(decided.data, say)
    if table.labels is not None:
        _settle_objective(decided, table)
        _settle_model(decided, table)
        _settle_batch(decided)
    else:
        check_next_token(decided.task, of_text=True)
        if table.columns.kind != "text":
            _settle_rows(decided)
    return _settled(spec, decided)


def _settled(spec: Spec, decided: _Decided) -> Settled:
    """Return a spec with what was decided of its task."""
    if not decided.records:
        return Settled(spec)
    origins = {record.what: f"inferred: {record.because}" for record in decided.records}
    settled = replace(spec, task=decided.task, provenance={**spec.provenance, **origins})
    return Settled(settled, tuple(decided.records))


def with_copy(spec: Spec) -> Settled:
    """Return a spec of preference pairs in its folder's tokens.

    A model that is trained whole stands beside a frozen copy of it.
    """
    decided = _Decided(spec.task)
    _settle_pairs(decided)
    task = decided.task
    wraps = isinstance(task.model, ModelSpec) and task.model.name != REFERENCED and not is_import_path(task.model.name)
    if not wraps or not task.adaptation.is_full or not isinstance(task.data, DataSpec):
        return _settled(spec, decided)
    source, _ = open_sources(task.data, task.seed)
    given = {name: value for name, value in dataclasses.asdict(task.model).items() if value != _plain_model(name)}
    arguments = {"model": {"name": task.model.name, **given}, "vocab": source.vocab or 0,
                 "seq_len": source.items_per_sample}  # fmt: skip
    because = "all of the model is trained, so a frozen copy is what preferences are held against"
    decided.option("model", ModelSpec(name=REFERENCED, arguments=arguments), because)
    return _settled(spec, decided)


def _settle_pairs(decided: _Decided) -> None:
    """Have pairs for a folder of Hugging Face written in the folder's tokens, unless a tokenizer is named."""
    task = decided.task
    if not isinstance(task.model, ModelSpec) or not isinstance(task.data, DataSpec):
        return
    if (known := tokenizer_of(task.model.name)) is None:
        return
    because = "the model knows its folder's tokens"
    if not task.data.mix:
        if task.data.source == ANSWERS and "tokenizer" not in task.data.arguments:
            decided.data_option("arguments", {**task.data.arguments, "tokenizer": str(known)}, because)
        return
    for place, part in enumerate(task.data.mix):
        arguments = part.arguments or task.data.arguments  # as DataSpec.parts has them
        if part.source == ANSWERS and "tokenizer" not in arguments:
            decided.arguments_of_part(place, {**arguments, "tokenizer": str(known)}, because)


def _plain_model(name: str) -> object:
    return getattr(ModelSpec(), name)


class _Decided:
    """A task that is being settled, and the decisions so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.records: list[DecisionRecord] = []

    @property
    def data(self) -> DataSpec:
        """The task's data as they are by now."""
        assert isinstance(self.task.data, DataSpec)
        return self.task.data

    def data_option(self, name: str, value: Any, because: str) -> None:
        """Set an option of the data."""
        self._note(f"task.data.{name}", getattr(self.data, name), value, because)
        self.task = replace(self.task, data=replace(self.data, **{name: value}))

    def arguments_of_part(self, place: int, arguments: dict[str, Any], because: str) -> None:
        """Set the arguments of one source of a mixture."""
        parts = list(self.data.mix)
        self._note(f"task.data.mix.{parts[place].label}.arguments", parts[place].arguments, arguments, because)
        parts[place] = replace(parts[place], arguments=arguments)
        self.task = replace(self.task, data=replace(self.data, mix=tuple(parts)))

    def option(self, name: str, value: Any, because: str) -> None:
        """Set an option of the task."""
        before = getattr(self.task, name)
        plain = [dataclasses.asdict(each) if isinstance(each, ModelSpec) else str(each) for each in (before, value)]
        self._note(f"task.{name}", plain[0], plain[1], because)
        self.task = replace(self.task, **{name: value})

    def _note(self, what: str, before: object, value: object, because: str) -> None:
        from paceline.spec.journal.kinds import DecisionRecord

        self.records.append(DecisionRecord(what, before, value, because, {"source": self.data.source}))


def _settle_source(decided: _Decided) -> bool:
    """Return whether the data are a table, and say so in the source where it is seen from the columns."""
    data = decided.data
    scheme, path = scheme_of(data.source)
    if scheme == "table":
        return True
    if data.source in ("", *NAMED_SOURCES) or scheme == "text" or data.collate:
        return False
    kind = kind_of_source(data.source)[0]
    if kind == "table":
        decided.data_option("source", f"table:{data.source}", "CSV and JSON are tables, never prose")
        return True
    if kind not in ("text", "hf") or decided.task.objective == "next_token":
        return False
    if scheme == "hf" and Path(path).expanduser().is_dir() and not any(Path(path).expanduser().glob("*.arrow")):
        listing = list_table(data)
    else:
        listing = list_files(data)
    if any(kind_of(file.name) not in TABLE_KINDS for file in listing.files):
        return False
    from paceline.task.data.sources.tables.columns import asked_by_dots, is_kind_of_table
    from paceline.task.data.sources.tables.records import columns_of

    try:
        columns = columns_of(listing, asked_by_dots(data))
    except DamagedData:
        return False  # its reader says what is damaged, or leaves it out
    asked = replace(data, labels=decided.task.objective) if _asks_labels(decided.task) else data
    if set(columns) >= PREFERENCES or not is_kind_of_table(columns, asked):
        return False
    named = ", ".join(columns)
    because = f"it has the columns {named} (text:{data.source} takes the text alone)"
    decided.data_option("source", f"table:{data.source}", because)
    return True


def _asks_labels(task: Task) -> bool:
    return task.objective in LABEL_OBJECTIVES and isinstance(task.data, DataSpec) and task.data.labels == "auto"


def _settle_labels_asked(decided: _Decided) -> None:
    """Have the labels be what a named objective needs. Raises ConfigError where both are named and differ."""
    objective, labels = decided.task.objective, decided.data.labels
    if objective == "next_token" and labels == "auto":
        decided.data_option("labels", "none", "the objective is next_token")
    elif objective in LABEL_OBJECTIVES and labels == "auto":
        decided.data_option("labels", objective, f"the objective is {objective}")
    elif objective in LABEL_OBJECTIVES and labels != objective:
        raise ConfigError(
            f"task.objective = '{objective}' with task.data.labels = '{labels}'", "one of them decides the loss",
            f'task.objective = "auto", or labels = "{objective}"',
        )  # fmt: skip


def _settle_objective(decided: _Decided, table: TextTable) -> None:
    assert table.labels is not None
    if table.labels.classes and not decided.data.label_fields:  # which say what classes there are
        check_classes(set().union(*table.counts.values()), table.columns.names[1], table.corpus.what)
    if decided.data.labels == "auto":  # rows that come later do not make other labels of them
        decided.data_option("labels", table.labels.kind, table.labels.because)
    if decided.task.objective == "auto" and not decided.task.turns:
        decided.option("objective", table.labels.kind, f"the labels are of {table.labels.kind}")


def _settle_model(decided: _Decided, table: TextTable) -> None:
    """Give a model of the built-in family a head as wide as the labels ask for."""
    model, labels = decided.task.model, table.labels
    assert labels is not None
    if not isinstance(model, ModelSpec):
        return
    if is_import_path(model.name):
        _check_head(model, labels.outputs)
        return
    if (folder := folder_of(model.name)) is not None:
        if (found := with_head(model, folder, table)) is not None:
            decided.option("model", *found)
        _train_head(decided)
        return
    if model.starts_from:
        raise ConfigError(
            f"task.model.weights with '{model.name}' and labels for whole texts",
            f"the file has no head of {labels.outputs} outputs",
            "leave the weights out, or name a model with that head",
        )  # fmt: skip
    given = {name: getattr(model, name) for name in SHAPE_OPTIONS if getattr(model, name)}
    arguments = {"size": model.name, "outputs": labels.outputs, "vocab": table.corpus.vocab, **given}
    because = f"a head for {labels.outputs} outputs on the mean over a text's tokens ({labels.kind})"
    decided.option("model", ModelSpec(name=POOLED, arguments=arguments), because)


def _train_head(decided: _Decided) -> None:
    """Have a new head be trained where adapters, or patterns, would leave it as it was drawn."""
    task = decided.task
    assert isinstance(task.model, ModelSpec)
    missing = [pattern for pattern in new_head_of(task.model) if pattern not in task.train]
    if not task.adaptation.is_full and missing:
        decided.option("train", (*task.train, *missing), "the head is drawn anew, so it is trained too")


def _refuse_pairs(task: Task) -> None:
    """Raise ConfigError for sources and targets that are named as a table: which texts they are is asked otherwise."""
    if task.objective != SEQ2SEQ:
        return
    path, name = scheme_of(task.data.source)[1], task.model.name if isinstance(task.model, ModelSpec) else ""
    folder = folder_of(name) or "FOLDER"
    raise ConfigError(
        f"the objective seq2seq on the table '{path}'",
        "a table is read as texts with labels, prompts or turns; sources and their targets are made by a factory,"
        " which asks the tokenizer of the model's folder",
        f'data.source = "{PAIRS}", data.arguments = {{ path = "{path}", model = "{folder}" }}, with source_field and'
        " target_field where the columns are not called source and target",
    )


def _refuse_other_pairs(task: Task) -> None:
    """Raise ConfigError for sources and targets in the tokens of another folder than the model's."""
    for part in task.data.parts() if isinstance(task.model, ModelSpec) else ():
        named = part.arguments.get("model") if part.source == PAIRS else None
        if not isinstance(named, str) or (own := tokenizer_of(task.model.name)) is None:
            continue
        other = Path(named.removeprefix(THEIRS)).expanduser() / TOKENIZER
        if not other.is_file():
            continue  # who reads the pairs says so
        from paceline.task.data.rows.one_tokenizer import unlike

        if differs := unlike(own.read_text("utf-8"), other.read_text("utf-8")):
            raise ConfigError(
                f"pairs in the tokens of '{named}' for the model in '{task.model.name}'", differs,
                f'data.arguments.model = "{task.model.name}"',
            )  # fmt: skip


def _settle_image_head(decided: _Decided) -> None:
    """Give a folder of Hugging Face that tells images apart a head for the classes that there are."""
    task, model = decided.task, decided.task.model
    if not isinstance(model, ModelSpec) or (folder := folder_of(model.name)) is None or task.data.mix:
        return
    if task.objective not in ("auto", "classification"):
        return
    kind, path = ("", "") if decided.data.collate else kind_of_source(decided.data.source)
    if kind == "images":
        from paceline.task.data.sources.images.listing import list_images
        from paceline.task.data.sources.shards.opened import storage_of

        _settle_pixels(decided, folder)
        data = decided.data
        found = with_image_head(
            model, folder, lambda: list_images(path, storage_of(data), tuple(data.include)).classes
        )  # fmt: skip
        if found is not None:
            decided.option("model", *found)
        _train_head(decided)


def _settle_pixels(decided: _Decided, folder: Path) -> None:
    """Have pixels be as the model of a folder has seen them, where the data state nothing else."""
    before = decided.data
    unstated = [name for name in ("normalise", "image_size") if not before.states(name)]
    for name, value in pixels_of(folder, need_word="normalise" in unstated).items():
        if name in unstated and value != getattr(before, name):
            decided.data_option(name, value, f"the {PREPROCESSOR} of the model's folder says so")


def _check_head(model: ModelSpec, outputs: int) -> None:
    """Raise ConfigError for a head of another width than the labels: the spec was settled on other data."""
    if model.name == POOLED and model.arguments.get("outputs") != outputs:
        raise ConfigError(
            f"the model has a head of {model.arguments.get('outputs')} outputs, and the labels need {outputs}",
            "the classes of the data are others than those that the model was made for",
            "the data of before, or task.model as a named size, which gets a head of its own",
        )


def _settle_batch(decided: _Decided) -> None:
    """Count a batch in rows. Raises ConfigError for tokens, of which rows have no fixed number."""
    task = decided.task
    if task.global_batch.unit != "tokens" or task.batch_rows == "by_length":
        return
    if task.global_batch != Task.__dataclass_fields__["global_batch"].default:
        raise ConfigError(
            f"task.global_batch = '{task.global_batch}' of labelled texts",
            "they differ in length, and each counts once",
            f'task.global_batch = "{ROWS}", or task.batch_rows = "by_length"',
        )  # fmt: skip
    decided.option("global_batch", ROWS, "labelled texts are counted in samples")


def _settle_rows(decided: _Decided) -> None:
    """Have conversations lie in rows of their own, or side by side where the model keeps them apart."""
    if decided.data.rows != "windows":
        return
    model = decided.task.model
    if isinstance(model, ModelSpec) and not is_factory(model.name):
        decided.data_option("rows", "packed", "the model keeps those of a row apart")
        decided.data_option("cross_documents", False, "no conversation sees another")
    else:
        decided.data_option("rows", "padded", "one in a row, which any causal model takes")


def _is_text(data: DataSpec) -> bool:
    """Return whether data are texts, or tokens of texts, and nothing beside them."""
    if data.collate or data.source == "digits" or data.mix:
        return False
    return kind_of_source(data.source)[0] in ("text", "hf", "shards", "megatron")


def _refuse_labels(task: Task) -> None:
    """Raise ConfigError where an objective of labels would get the bytes of a text."""
    data = task.data
    assert isinstance(data, DataSpec)
    if task.objective in LABEL_OBJECTIVES and _is_text(data):
        raise ConfigError(
            f"task.objective = '{task.objective}' with data that have no labels",
            f"'{inner_path(data.source)}' is text: its tokens would be taken for classes",
            "a table of texts with labels (CSV, JSONL, Parquet), or task.objective = \"next_token\"",
        )  # fmt: skip
