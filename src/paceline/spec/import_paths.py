"""How a spec file names an object of the user's code, `package.module:attribute`, and data of a kind, `kind:path`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError, PacelineError, suggestion

# What Python may put in the place of a name: attributes that such an object has, and what it is in words.
CALLED = {"__call__": "a function"}
MODELS = {"__call__": "a torch.nn.Module or a function that makes one"}
DATA_SETS = {"__len__ __getitem__": "a data set with a length, or (train, validation)", "read samples": "a Source",
             "open_sources": "what opens sources"}  # fmt: skip
HOOKS = ("on_start", "before_step", "after_step", "after_evaluation", "on_save", "on_end")  # of callbacks
CALLBACKS = {"__call__": "a class or a function", **dict.fromkeys(HOOKS, "an object with hooks")}
METRICS = {"__call__": "a function (outputs, batch)"}
# A module of one of these names cannot be named as the data's: give it another name.
SCHEMES = {
    "table": "texts with labels, prompts with completions, or conversations: CSV, TSV, JSONL, Parquet or Arrow",
    "text": "documents: text, JSONL, Parquet or Arrow, in a file or a folder",
    "hf": "a data set of Hugging Face: its name on the hub, or a folder that `save_to_disk` wrote",
    "shards": "a folder of token shards, as `paceline data prepare` writes it",
    "megatron": "the prefix of Megatron's PREFIX.bin and PREFIX.idx",
    "images": "a folder of images, one folder for each class, or tar files of them",
}


def is_import_path(text: str) -> bool:
    """Return whether the text has the form `package.module:attribute`."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(
        part.isidentifier() for dotted in (module, attribute) for part in dotted.strip().split(".")
    )


def scheme_of(source: str) -> tuple[str, str]:
    """Return the scheme that a source names, "" where it names none, and the rest of it."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme in SCHEMES and not rest.startswith("//"):
        return scheme, rest
    return "", source


def names_object(source: str) -> bool:
    """Return whether a source is `package.module:object`, a data set of the user's."""
    return not scheme_of(source)[0] and is_import_path(source)


def make_importable(folders: Iterable[str | Path]) -> None:
    """Append folders to `sys.path`, each once, so that modules beside a spec file can be imported.

    They come last: a file that happens to be called `random.py` must not replace Python's own module.
    """
    for folder in folders:
        resolved = str(Path(folder).resolve())
        if resolved not in sys.path:
            sys.path.append(resolved)


def load_object(path: str, purpose: str, search: Iterable[str | Path] = ()) -> Any:
    """Return the object that `package.module:attribute` names; `attribute` may be dotted.

    `purpose` names the option in messages, such as "task.model.name". Modules are looked for on `sys.path`, then in
    the folders of `search`; `load_spec` has already added the spec file's folder and the current one. Raises
    ConfigError where the text is malformed, or the module or the attribute is missing or fails to import.
    """
    if not is_import_path(path):
        raise ConfigError(
            f"{purpose} = '{path}' names no object", "an import path has the form package.module:attribute",
            'for example "my_model:build" for the function build in my_model.py beside the spec file',
        )  # fmt: skip
    make_importable(search)
    name, _, attributes = (part.strip() for part in path.partition(":"))
    module = _import(name, path, purpose)
    found: object = module
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            public = [known for known in vars(module) if not known.startswith("_")] if found is module else []
            where = getattr(module, "__file__", None) or "built in"
            raise ConfigError(
                f"{purpose} = '{path}' names no object", f"'{name}' ({where}) has no '{attribute}'",
                suggestion(attribute, public) if public else "define it there",
            )  # fmt: skip
        found = getattr(found, attribute)
    return found


def _import(name: str, path: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except PacelineError:
        raise
    except ModuleNotFoundError as error:
        absent = error.name or name
        if name == absent or name.startswith(absent + "."):
            if name.endswith(".py"):
                meant = f"{name.removesuffix('.py')}:{path.partition(':')[2].strip()}"
                raise ConfigError(
                    f"{purpose} = '{path}' cannot be imported", f"'{name}' is the name of a file, and not of a module",
                    f"did you mean '{meant}'?",
                ) from error  # fmt: skip
            raise ConfigError(
                f"{purpose} = '{path}' cannot be imported", f"there is no module '{absent}'",
                f"put {absent.replace('.', '/')}.py beside the spec file, or install the package that holds it",
            ) from error  # fmt: skip
        raise ConfigError(
            f"{purpose} = '{path}' cannot be imported", f"module '{name}' needs '{absent}', which is not installed",
            f"install the package that holds '{absent}'",
        ) from error  # fmt: skip
    except Exception as error:  # a user's module may raise anything; the message says what and where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{purpose} = '{path}' cannot be imported",
            f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {error}",
            "mend the module; nothing in it may fail at import",
        ) from error
