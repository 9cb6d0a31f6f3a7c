"""Spec: what a run is made of, read from a TOML file and the command line: task, cluster, plan and run.

    spec = load_spec("examples/stdlib-code.toml", ["task.optimizer.lr=1e-3"])

Defaults are replaced by the file, the file by the command line; `provenance` tells where each value came from.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import build, plain, schema, shape
from paceline.config.build import Override
from paceline.config.declared import Declared, caller, from_file
from paceline.config.document import TomlDocument, parse_document, read_document
from paceline.config.fields import option
from paceline.config.problems import Problems
from paceline.config.values import literal
from paceline.errors import ConfigError
from paceline.spec.amounts import batch_samples
from paceline.spec.cluster import HERE, OF_ONE_DEVICE, ClusterSpec
from paceline.spec.data.rules import check_data
from paceline.spec.import_paths import is_import_path, make_importable, names_object, scheme_of
from paceline.spec.model_folder import FRESH, THEIRS, folder_of
from paceline.spec.optimizers import names_of
from paceline.spec.plan import PlanSpec, parse_rows, parse_stages
from paceline.spec.run import RunSpec
from paceline.spec.steps.selection import check_selection
from paceline.spec.steps.turns import check_turns
from paceline.spec.survive.faults import check_faults
from paceline.spec.survive.recovery import check_notice
from paceline.spec.task import DataSpec, Task
from paceline.spec.watch.evaluate import check_evaluate

# Options that name a file or a folder: looked for beside the spec file first, then from the current folder.
PATHS = (
    "task.model.name",
    "task.model.weights",
    "task.data.source",
    "task.data.tokenizer",
    "task.data.cache_dir",
    "cluster.catalog",
    "run.when.tariff",
    "run.when.carbon",
)
WITH_SOURCES = (("task", "data", "mix"), ("task", "evaluate", "sets"))  # lists of tables, each with a source
OUTPUTS = ("run.dir",)  # written to: from the current folder, as a shell would
BUILT_IN = {
    "task.model.weights": (FRESH,),
    "task.data.source": ("stdlib", "digits"),
    "task.data.tokenizer": ("bytes", "bpe"),
}


@dataclass(frozen=True)
class SpecTables(Declared):
    """The tables of a spec file."""

    task: Task = option(factory=Task, doc="what to learn")
    cluster: ClusterSpec = option(factory=ClusterSpec, doc="what it runs on")
    plan: PlanSpec = option(factory=PlanSpec, doc="constraints on the plan; what is left unset is the planner's choice")
    run: RunSpec = option(factory=RunSpec, doc="where the run lives and what it keeps")


@dataclass(frozen=True)
class Spec(SpecTables):
    """The four tables, the origin of every value by dotted key, and the file they came from.

    An origin is "default", "examples/x.toml:12", or the command-line option that set the value ("--set").
    """

    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    path: Path | None = dataclasses.field(default=None, compare=False)
    remarks: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # of values that were left out, and why


@functools.cache
def table() -> shape.ShapedTable:
    """Return the shape of a spec: every table and option with its rules and documentation."""
    return shape.table_of(SpecTables, "spec")


def load_spec(path: str | Path | None, overrides: Sequence[str | Override] = ()) -> Spec:
    """Return the spec of a TOML file (None: the defaults) with overrides such as "task.seed=3" applied in order.

    Folders of the user's code (the file's own, and the current one) become importable. Raises ConfigError, with the
    file and line, for unknown keys and for values that break a rule.
    """
    document = TomlDocument("defaults", {}, {}) if path is None else read_document(path)
    return _from_document(document, overrides, None if path is None else Path(path))


def parse_spec(text: str, name: str = "spec", overrides: Sequence[str | Override] = ()) -> Spec:
    """Return the spec that TOML text states; `name` stands for the file in messages."""
    return _from_document(parse_document(text, name), overrides, None)


def _from_document(document: TomlDocument, overrides: Sequence[str | Override], path: Path | None) -> Spec:
    problems = Problems()
    layers = [build.document_layer(table(), document, problems)]
    for override in overrides:
        with problems.noting():
            parsed = build.parse_override(override) if isinstance(override, str) else override
            layers.append(build.override_layer(table(), parsed, problems))
    layers[0], remarks = _of_this_device(layers[0], build.overlay(layers))
    return dataclasses.replace(_finish(build.overlay(layers), path, problems), remarks=remarks)


def _of_this_device(file: build.GivenLayer, whole: build.GivenLayer) -> tuple[build.GivenLayer, tuple[str, ...]]:
    """Return a spec file's values without figures of its device where the command line names another device.

    A file for `cuda` may state a peak that means nothing with `--set cluster.device=cpu`. Figures that the command line
    itself states stay. The second result is what to tell of those that went.
    """
    key = ("cluster", "device")
    before, after = (str(each[key].value) if key in each else ClusterSpec.device for each in (file, whole))
    if before == after or (before in HERE and after in HERE):
        return file, ()
    stated = [key for key in file if key[0] == "cluster" and len(key) > 1 and key[1] in OF_ONE_DEVICE
              and whole.get(key) is file[key]]  # fmt: skip
    remarks = [
        f"{build.dotted(key)} = {literal(file[key].value)} ({file[key].origin}) was stated beside device = "
        f"'{before}', and is left out for '{after}': --set {build.dotted(key)}=... states it for that one"
        for key in stated
    ]
    return {key: entry for key, entry in file.items() if key not in stated}, tuple(remarks)


def spec_to_dict(spec: SpecTables) -> dict[str, object]:
    """Return the four tables as plain data for JSON, and the spec file as "path". Objects become import paths."""
    path = spec.path if isinstance(spec, Spec) else None
    return {**plain.to_plain(table(), spec), **({"path": str(path.resolve())} if path else {})}


def spec_from_dict(values: Mapping[str, Any], path: Path | None = None, origin: str = "a record") -> Spec:
    """Return the spec that `spec_to_dict` wrote, in any process: the user's code is found beside the spec file.

    `path` is that file where the record's own "path" no longer holds.
    """
    tables = {name: value for name, value in values.items() if name != "path"}
    path = path or (Path(values["path"]) if values.get("path") else None)
    return _finish(build.mapping_layer(table(), tables, lambda key: origin), path)


def dump_toml(spec: SpecTables, comments: bool = False) -> str:
    """Return the whole spec, defaults included, as TOML that loads as an equal spec; with comments, each documented."""
    return plain.dump_toml(table(), spec, (lambda key, member: member.doc) if comments else None)


def spec_values(spec: SpecTables) -> list[tuple[str, object]]:
    """Return (dotted key, value as a file would hold it) of every option."""
    return list(plain.flat_values(table(), spec))


def provenance_lines(spec: Spec) -> list[str]:
    """Return one line per option: its key and value in TOML, and the origin of the value."""
    rows = [(f"{key} = {literal(value)}", _origin(spec, key)) for key, value in spec_values(spec)]
    width = max(len(left) for left, _ in rows)
    return [f"{left:<{width}}  {origin}" for left, origin in rows]


def spec_schema() -> dict[str, schema.Rule]:
    """Return the JSON schema of spec files."""
    return schema.json_schema(table(), "A Paceline spec")


def _origin(spec: Spec, key: str) -> str:
    while key and key not in spec.provenance:
        key = key.rpartition(".")[0]
    return spec.provenance.get(key) or caller() or "python"


def _finish(layer: build.GivenLayer, path: Path | None, problems: Problems | None = None) -> Spec:
    folders = [path.parent.resolve()] if path else []
    make_importable([*folders, Path.cwd()])
    layer = {key: _located_path(build.dotted(key), entry, folders) for key, entry in layer.items()}
    for key in WITH_SOURCES:
        if (entry := layer.get(key)) and isinstance(entry.value, list | tuple):
            located = [_located_source(each, entry, folders) for each in entry.value]
            layer[key] = dataclasses.replace(entry, value=located)
    tables, provenance = build.build(table(), layer, problems)
    with from_file():
        spec = Spec(**{field.name: getattr(tables, field.name) for field in dataclasses.fields(SpecTables)},
                    provenance=provenance, path=path)  # fmt: skip
    check(spec)
    return spec


def _located_path(key: str, entry: build.GivenValue, folders: Sequence[Path]) -> build.GivenValue:
    """Return the entry with a path made absolute where it exists beside the spec file, and "~" resolved."""
    text = entry.value
    if key not in (*PATHS, *OUTPUTS) or not isinstance(text, str) or not text or "\0" in text:
        return entry
    scheme, rest = scheme_of(text) if key == "task.data.source" else ("", text)
    if scheme:
        found = [folder for folder in folders if _exists(folder / rest) or _exists(folder / f"{rest}.idx")]
        return dataclasses.replace(entry, value=f"{scheme}:{found[0] / rest}") if found else entry
    if text in BUILT_IN.get(key, ()) or is_import_path(text):
        return entry
    if key == "task.model.name":
        return dataclasses.replace(entry, value=_located_model(text, folders))
    if text.startswith("~"):
        try:
            return dataclasses.replace(entry, value=str(Path(text).expanduser()))
        except RuntimeError as error:
            raise ConfigError(f"{entry.origin}: {key} = {literal(text)} names no folder", str(error)) from error
    beside = [folder / text for folder in folders if key in PATHS and _exists(folder / text)]
    return dataclasses.replace(entry, value=str(beside[0])) if beside else entry


def _located_model(name: str, folders: Sequence[Path]) -> str:
    """Return a model's name; the path of a folder made absolute where it exists beside the spec file, or "~" is in it.

    Only what has a "/" is a path: a folder that happens to be called as a named size does not take its place.
    """
    folder = folder_of(name)
    if folder is None:
        return name
    beside = next((each / folder for each in folders if _exists(each / folder)), folder)
    scheme = THEIRS if name.startswith(THEIRS) else ""
    return f"{scheme}{beside}" if beside.is_absolute() else name


def _located_source(part: object, entry: build.GivenValue, folders: Sequence[Path]) -> object:
    """Return a table with a source, with its path made absolute where it exists beside the spec file."""
    if not isinstance(part, Mapping) or "source" not in part:
        return part
    found = _located_path("task.data.source", dataclasses.replace(entry, value=part["source"]), folders)
    return {**part, "source": found.value}


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system
        return False


def check(spec: Spec) -> None:
    """Raise ConfigError, with the origin of each value, for all options that contradict each other."""
    problems, task = Problems(), spec.task
    with problems.noting(_place(spec, "run.faults")):
        check_faults(spec.run.faults)
    with problems.noting(_place(spec, "run.recovery.notice_url")):
        check_notice(spec.run.recovery)
    with problems.noting(_place(spec, "task.name")):
        if not re.fullmatch(r"[\w][\w .+-]*", task.name):
            _refuse("task.name", literal(task.name), "it names a folder", "letters, digits, '.', '_' and '-'")
    with problems.noting(_place(spec, "task.data.mix", "task.data")):
        check_data(task.data)
    if isinstance(task.data, DataSpec) and all(_is_of_tokens(part.source) for part in task.data.parts()):
        with problems.noting(_place(spec, "task.global_batch", "task.data.seq_len")):
            batch_samples(task, task.data.seq_len)
    with problems.noting(_place(spec, "task.turns")):
        check_turns(task)
    with problems.noting(_place(spec, "task.evaluate")):
        check_evaluate(task.evaluate)
    with problems.noting(_place(spec, "task.callbacks")):
        for name in task.callbacks:
            if isinstance(name, str) and not is_import_path(name):
                _refuse("task.callbacks", literal(name), "it names no object", "package.module:Class")
    with problems.noting(_place(spec, "task.selection")):
        check_selection(task)
    with problems.noting(_place(spec, "task.optimizer")):
        names_of(task.optimizer)
    with problems.noting(_place(spec, "plan.sync")):
        _check_sync(spec.plan)
    with problems.noting(_place(spec, "plan.rows")):
        parse_rows(spec.plan.rows)
    with problems.noting(_place(spec, "plan.stages")):
        parse_stages(spec.plan.stages)
    if task.schedule.decay is not None and task.schedule.kind != "wsd":
        with problems.noting(_place(spec, "task.schedule.decay")):
            because = f"the schedule '{task.schedule.kind}' has no separate decay"
            _refuse("task.schedule.decay", literal(str(task.schedule.decay)), because, 'task.schedule.kind = "wsd"')
    problems.raise_all()


def _place(spec: Spec, *keys: str) -> str:
    """Return where what is wrong with options stands: the first of them, or of their tables' options, that was given.

    An option that was left out has no line of its own: that of its table's first one is told, or else the spec file.
    """
    given = {key: origin for key, origin in spec.provenance.items() if origin != build.DEFAULT}
    for key in keys:
        if key in given:
            return given[key]
        if inside := [origin for other, origin in given.items() if other.startswith(f"{key}.")]:
            return inside[0]
    return str(spec.path) if spec.path else caller() or "python"


def _check_sync(plan: PlanSpec) -> None:
    if not plan.sync.is_plain and plan.dp_replicate < 2:
        copies = f"plan.dp_replicate is {plan.dp_replicate or 'unset'}"
        _refuse("plan.sync.kind", f"'{plan.sync.kind}' ({plan.sync})",
                f"{copies}, and the number of copies is a part of what is computed: the planner does not choose it",
                "plan.dp_replicate = 2, or more copies")  # fmt: skip


def _is_of_tokens(source: str) -> bool:
    scheme, path = scheme_of(source)
    rows = scheme in ("images", "table") or bool(re.search(r"\.[ct]sv(\.(gz|bz2|xz|zst))?$", path.lower()))
    return source != "digits" and not names_object(source) and not rows


def _refuse(key: str, value: str, because: str, fix: str) -> None:
    raise ConfigError(f"{key} = {value} cannot be", because, fix)
