"""Adapters as peft writes and reads them: a folder with adapter_config.json and adapter_model.safetensors.

| here                              | in the file                                                  |
|-----------------------------------|--------------------------------------------------------------|
| `...q_proj.lora_A` [rank, in]     | `base_model.model.model....q_proj.lora_A.weight` [rank, in]  |
| `...q_proj.lora_B` [rank, out]    | `base_model.model.model....q_proj.lora_B.weight` [out, rank] |
| `...q_proj.lora_magnitude_vector` | the same [out]                                               |
| another trained parameter         | `base_model.model.NAME`, its module in `modules_to_save`     |

Beside stacked experts peft takes layers of some names for the experts of old, one by one, and drops their adapters:
there those layers are named in `target_parameters`, by their weights.

The second `model.` is that of transformers' causal models; a module of the user's own has the names that it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.durable import make_folder, publish, write_text
from paceline.errors import ConfigError, StorageError
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.task.adapt.linear import NAMES, AdaptedLinear, B, TurnedLinear, is_adapter
from paceline.task.models.decoder import Decoder
from paceline.task.models.huggingface.files import LazyTensors, read_safetensors
from paceline.task.models.huggingface.names import hf_name
from paceline.task.models.huggingface.new_heads import OF_TOKENS
from paceline.task.models.init import Corner, fill
from paceline.task.plain_names import named_parameters

FOLDER_PREFIX = "base_model.model."
CLASSIFIES, CAUSAL = "SEQ_CLS", "CAUSAL_LM"  # peft's task types of a classifier of texts, and of a causal model
CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
# Names of layers that peft takes for experts' where experts are stacked (utils/transformers_weight_conversion.py).
LIKE_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
# What peft knows and an adapter here has not, with what it must be to say nothing.
OFF: tuple[object, ...] = (None, False, {}, [])
UNKNOWN: dict[str, tuple[object, ...]] = {"bias": ("none",)} | dict.fromkeys(
    ("rank_pattern", "alpha_pattern", "layer_replication", "lora_bias",
     "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "kasa_config", "arrow_config",
     "monteclora_config"), OFF,
)  # fmt: skip
# First values that leave the frozen weights alone. Others (pissa, olora, corda, loftq) take something out of these, so
# that an adapter beside the whole weights is another model.
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


def file_name(name: str, *, is_decoder: bool) -> str:
    """Return the name in peft's file of a parameter of ours; the built-in decoder has transformers' names there."""
    own = hf_name(name) if is_decoder else name
    return FOLDER_PREFIX + own + (".weight" if name.rpartition(".")[2] in NAMES[:2] else "")


def adapter_config(
    spec: AdapterSpec,
    targets: list[str],
    saved: list[str],
    base: str,
    kind: str,
    is_turned: bool = False,
    stacks_experts: bool = False,
) -> dict[str, object]:
    """Return the content of adapter_config.json for adapters beside these modules, in the names of the file.

    `kind` is peft's task type: which of its classes loads the adapter; `is_turned` says that weights lie as [in, out],
    `stacks_experts` that the model's experts are stacked. Raises ConfigError for adapters that peft would drop.
    """
    by_weight = [name for name in targets if stacks_experts and name.rpartition(".")[2] in LIKE_EXPERTS]
    if by_weight and spec.kind == "dora":
        raise ConfigError(
            f"peft would drop the adapter of {by_weight[0]}",
            f"it takes {len(by_weight)} of these layers for experts, which are stacked, and has no DoRA for those",
            "--merge, which writes whole weights; or task.adapter.targets without them",
        )
    config: dict[str, object] = {
        "peft_type": "LORA", "task_type": kind or None, "base_model_name_or_path": base or None,
        "inference_mode": True, "r": spec.rank, "lora_alpha": spec.alpha,
        "lora_dropout": 0.0 if by_weight else spec.dropout,  # of a weight by itself peft has none
        "target_modules": [name for name in targets if name not in by_weight], "modules_to_save": saved or None,
        "use_rslora": spec.kind == "rslora", "use_dora": spec.kind == "dora", "bias": "none",
        "fan_in_fan_out": is_turned, "init_lora_weights": True,
    }  # fmt: skip
    return config | ({"target_parameters": [f"{name}.weight" for name in by_weight]} if by_weight else {})


def write_adapter(
    tensors: Mapping[str, Tensor],
    spec: AdapterSpec,
    trained: set[str],
    folder: Path,
    *,
    base: str,
    is_decoder: bool,
    architecture: str = "",
    is_turned: bool = False,
) -> list[Path]:
    """Write the adapters among a model's tensors, and the modules with `trained` parameters, into a folder.

    `base` is the folder that the frozen weights came from, `architecture` the class of transformers, "" where there is
    none; `is_turned` says that frozen weights lie as [in, out]. Returns the files. Raises StorageError where the folder
    cannot be written.
    """
    from safetensors.torch import save_file

    def theirs(module: str) -> str:
        return file_name(f"{module}.weight", is_decoder=is_decoder).removeprefix(FOLDER_PREFIX).removesuffix(".weight")

    modules = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
    targets = sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)})
    written = [name for name in tensors if is_adapter(name) or name.rpartition(".")[0] in modules]
    held = {
        file_name(name, is_decoder=is_decoder): (tensors[name].T if name.endswith(B) else tensors[name]).contiguous()
        for name in written
    }
    says_tokens = is_decoder or architecture.endswith(OF_TOKENS) or any("lm_head" in name for name in tensors)
    kind = CLASSIFIES if architecture.endswith("ForSequenceClassification") else CAUSAL if says_tokens else ""
    named = ([theirs(name) for name in targets], [theirs(name) for name in modules])
    stacks = any(".experts." in f".{name}" and tensor.dim() == 3 for name, tensor in tensors.items())
    config = adapter_config(spec, *named, base, kind, is_turned, stacks)
    try:
        make_folder(folder)
        save_file(held, folder / (FILE + ".part"), metadata={"format": "pt"})
        publish(folder / (FILE + ".part"), folder / FILE)
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write an adapter to {folder}", str(error), "a folder with room to write") from error
    return [folder / CONFIG, folder / FILE]


def read_adapter(model: nn.Module, layers: Mapping[str, AdaptedLinear], spec: AdapterSpec) -> None:
    """Fill a model's adapters, and the modules beside them that the folder holds, from a folder in peft's format.

    Of a sharded parameter each rank reads its own part. Raises ConfigError for everything that does not fit at once.
    """
    folder = Path(spec.weights).expanduser()
    _check_config(folder, spec, any(isinstance(layer, TurnedLinear) for layer in layers.values()))
    stored = read_safetensors(folder / FILE)
    is_decoder = isinstance(model, Decoder)
    names = {file_name(name, is_decoder=is_decoder): name for name, _ in named_parameters(model)}
    held = dict(named_parameters(model))
    wanted = {file for file, name in names.items() if is_adapter(name)}
    _check_names(stored, wanted, set(names), folder)
    for file in stored:
        if file in names:
            fill(held[names[file]], _part_of(stored, file, turned=names[file].endswith(B)))


def _part_of(stored: LazyTensors, file: str, *, turned: bool) -> Any:
    def part(offsets: Corner, sizes: Corner) -> Tensor:
        return stored.part(file, offsets[::-1], sizes[::-1]).T if turned else stored.part(file, offsets, sizes)

    return part


def _check_config(folder: Path, spec: AdapterSpec, is_turned: bool) -> None:
    try:
        told = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"task.adapter.weights = '{spec.weights}' is no adapter in peft's format", f"{CONFIG}: {error}",
            f"a folder with {CONFIG} and {FILE}",
        ) from error  # fmt: skip
    kind = "dora" if told.get("use_dora") else "rslora" if told.get("use_rslora") else "lora"
    wrong = [f"peft_type is {told.get('peft_type')}"] if told.get("peft_type") != "LORA" else []
    pairs = [
        ("kind", kind, spec.kind),
        ("rank", told.get("r"), spec.rank),
        ("alpha", told.get("lora_alpha"), spec.alpha),
    ]
    wrong += [f"{name} is {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]
    if told.get("fan_in_fan_out") and not is_turned:
        wrong.append("fan_in_fan_out = True is for weights that lie as [in, out], and none do here")
    wrong += [
        f"{key} = {told[key]} is not known here" for key, no in UNKNOWN.items() if key in told and told[key] not in no
    ]
    if kind == "dora" and told.get("use_rslora"):
        wrong.append("use_rslora scales its product by the root of the rank, and dora here by the rank")
    if (init := told.get("init_lora_weights")) not in PLAIN_INITS:
        wrong.append(
            f"init_lora_weights = '{init}' has changed the frozen weights beside it (peft writes it for the plain ones"
            " with path_initial_model_for_weight_conversion)"
        )
    by_weight = told.get("target_parameters") or []
    if any(name.rpartition(".")[2] != "weight" for name in by_weight):  # of stacked experts
        wrong.append(f"target_parameters = {by_weight} is not known here")
    if wrong:
        raise ConfigError(
            f"the adapter in {folder} is another than task.adapter", "; ".join(wrong),
            "the kind, rank and alpha of the folder's adapter_config.json",
        )  # fmt: skip


def _check_names(stored: LazyTensors, wanted: set[str], known: set[str], folder: Path) -> None:
    missing = sorted(wanted - set(stored))
    strange = sorted(set(stored) - known)
    told = [(missing, "missing"), (strange, "of layers that have no adapter here")]
    because = "; ".join(f"{len(names)} {what}: {', '.join(names[:3])}" for names, what in told if names)
    if because and not _of_other_stages(missing, strange):
        raise ConfigError(
            f"the adapter in {folder} is not this model's", because, "task.adapter.targets as in its target_modules"
        )


def _of_other_stages(missing: list[str], strange: list[str]) -> bool:
    """Return whether what the file has beside a model's own is other pipeline stages': none of its own is missing."""
    import torch.distributed as dist

    return not missing and bool(strange) and dist.is_initialized() and dist.get_world_size() > 1
