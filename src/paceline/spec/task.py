"""Task: what to learn. A task knows nothing of devices, so it stays the same whatever machines run it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.adapt.preference import PreferenceSpec
from paceline.spec.data.augment import AugmentSpec
from paceline.spec.data.mix import MixSpec
from paceline.spec.import_paths import CALLBACKS, CALLED, DATA_SETS, MODELS
from paceline.spec.model_folder import tokenizer_of, weights_of
from paceline.spec.steps.growth import GrowthSpec
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.spec.watch.samples import SamplesSpec
from paceline.units import Amount

BATCH_ROWS = ("fixed", "by_length")
LABELS = ("auto", "none", "classification", "regression", "multi_label")
TEMPLATES = ("auto", "plain", "chatml", "llama3", "tokenizer")


@dataclass(frozen=True)
class ModelSpec(Declared, table="task.model"):
    """The model: a named size of a built-in family, or a user's `torch.nn.Module`."""

    name: str = option(
        "llama-11m",
        "a named size (`paceline plan --models` lists them), `package.module:factory` of a module, or the path of a"
        " folder of Hugging Face, with a slash in it (`./my-llama`; `hf:./my-llama` builds the folder's own class)",
    )
    arguments: dict[str, Any] = option(factory=dict, doc="keyword arguments for a user's factory")
    hidden: int = option(0, "overrides the named size's hidden width (0 keeps it)", minimum=0)
    layers: int = option(0, "overrides the number of decoder layers", minimum=0)
    heads: int = option(0, "overrides the number of attention heads", minimum=0)
    kv_heads: int = option(0, "overrides the number of key/value heads", minimum=0)
    ffn: int = option(0, "overrides the width of the feed-forward layer, or of one expert", minimum=0)
    experts: int = option(0, "overrides the number of experts of a layer, of sizes that have them", minimum=0)
    top_k: int = option(0, "overrides the number of experts that a token passes", minimum=0)
    scoring: str = option(
        "",
        "how a router scores experts: 'softmax' (against each other) or 'sigmoid' (each alone, as in DeepSeek-V3);"
        " empty keeps the named size's choice",
        choices=("", "softmax", "sigmoid"),
    )
    balance: str = option(
        "",
        "how the load of experts is kept even: 'sequence' (an auxiliary loss per sequence), 'bias' (a selection bias"
        " that follows the load, no auxiliary loss) or 'none'; empty keeps the named size's choice",
        choices=("", "sequence", "bias", "none"),
    )
    balance_weight: float | None = option(
        None, "overrides the weight of the auxiliary loss of balance 'sequence'", minimum=0.0
    )
    vocab: int = option(0, "overrides the vocabulary; 0 takes the tokenizer's for the small sizes", minimum=0)
    tied: bool | None = option(None, "whether embedding and head share one weight; unset keeps the named size's choice")
    weights: str = option(
        "",
        "a safetensors file or folder to start from, in Hugging Face's names; empty reads the weights of a folder that"
        " `name` is, 'none' leaves them and starts fresh",
    )

    fresh: tuple[str, ...] = option(
        (),
        "patterns of parameter names, `*` for any text, that start fresh instead of from the weights: another head;"
        " what the weights have by these names is left out",
    )

    @property
    def starts_from(self) -> str:
        """The file or folder of weights that it starts from, "" for none."""
        return weights_of(self.name, self.weights)


@dataclass(frozen=True)
class DataSpec(Declared, table="task.data"):
    """The data: what is read, how it becomes tokens, how long a sample is."""

    source: str = option(
        "stdlib",
        "'stdlib', 'digits', a table (CSV, TSV, JSON, JSONL, Parquet, Arrow) of texts with labels, prompts or"
        " conversations, a file or folder of text, JSONL, Parquet, Arrow, images, token shards or Megatron's .bin"
        " and .idx, each also as a URL, `SCHEME:PATH` where the kind is not clear (table, text, hf, shards, megatron,"
        " images), or"
        " `module:factory` of a map-style set",
    )
    arguments: dict[str, Any] = option(
        factory=dict, doc="keyword arguments for a user's data set factory, or for a data set of Hugging Face"
    )
    collate: Any = option(
        "",
        "`package.module:function` that makes a batch of a user's samples, such as ragged ones: collate(samples) or"
        " collate(samples, ids); empty stacks them",
        objects=CALLED,
    )
    tokenizer: str = option(
        "bytes",
        "'bytes' (256 values and an end-of-document mark), 'bpe' (trained on the corpus), or a tokenizer.json; unset,"
        " that of the model's folder, where the model is one and has it",
    )
    vocab: int = option(4096, "size of a trained BPE vocabulary", minimum=258)
    seq_len: int = option(512, "tokens per sample", minimum=1)
    cross_documents: bool = option(
        True,
        "whether tokens see other documents of their sample; if not, each sees its own, and positions restart",
    )
    text_field: str = option("text", "the field or column of tables, JSONL and Parquet that holds the text")
    labels: str = option(
        "auto",
        "what the labels of a table are: 'classification' (one of several names or numbers), 'regression' (a number),"
        " 'multi_label' (several at once: a list, or a text split at '|'), 'none' (no labels: the text is learnt), or"
        " 'auto': seen from their values",
        choices=LABELS,
    )
    label_field: str = option(
        "",
        "the column of a table that holds the label; empty takes label, labels, class, target or category, of CSV and"
        " JSON also sentiment, rating, score and the like",
    )
    label_fields: tuple[str, ...] = option(
        (), "columns of 0 and 1, one for each class: together they are the labels, of which a row may have several"
    )
    prompt_field: str = option("prompt", "the column of a table that holds a prompt, of which no token counts")
    completion_field: str = option("completion", "the column that holds the completion of a prompt: its tokens count")
    messages_field: str = option(
        "messages",
        "the column that holds a conversation: a list of {role, content} or {from, value}; the assistant's tokens"
        " count. Where there is none of this name, conversations and the like are taken",
    )
    template: str = option(
        "auto",
        "how a conversation is written: 'plain' (a line with the role before each message), 'chatml', 'llama3',"
        " 'tokenizer' (the chat_template in the tokenizer's folder), or 'auto': the tokenizer's own, else 'plain'",
        choices=TEMPLATES,
    )
    include: tuple[str, ...] = option(
        (), "file name patterns to read from a folder, such as '*.py'; empty reads all known kinds"
    )
    validation_fraction: float = option(0.02, "fraction of documents held out for validation", minimum=0.0, maximum=0.5)
    max_bytes: int = option(0, "stop reading the corpus after so many bytes (0 reads all)", quantity="bytes", minimum=0)
    cache_dir: str = option(
        "", "where tokenised corpora and pieces of remote files are kept; empty means the user's cache folder"
    )
    cache_limit: int = option(
        100 * 2**30, "most bytes of remote files kept on local disk; what was not used for longest goes first",
        quantity="bytes", minimum=1,
    )  # fmt: skip
    image_size: int = option(
        224, "pixels of a side: images are scaled to it by their shorter side, and cut to a square", minimum=1
    )
    augment: AugmentSpec = option(factory=AugmentSpec, doc="what of images is drawn anew in each epoch")
    normalise: str = option(
        "none",
        "what pixels become: 'none' leaves them in 0..1, 'half' in -1..1, 'imagenet' takes off ImageNet's mean and"
        " divides by its deviation",
        choices=("none", "half", "imagenet"),
    )
    cache_images: bool = option(
        False, "keep decoded and scaled images on local disk, by a hash of their bytes, as far as cache_limit allows"
    )
    images_in_memory: int = option(
        64 * 2**20, "most bytes of decoded and scaled images that each process keeps in memory for later epochs",
        quantity="bytes", minimum=0,
    )  # fmt: skip
    on_bad: str = option(
        "stop",
        "what a damaged sample does: 'stop' ends the run (exit code 5) and says where, 'skip' counts and leaves it out",
        choices=("stop", "skip"),
    )
    rows: str = option(
        "windows",
        "how documents become samples: 'windows' cuts the text every seq_len tokens; 'packed' lays whole documents side"
        " by side, best fit first, and cuts only those that are longer than a sample; 'padded' fills each row of a"
        " table up to the longest of its micro-batch",
        choices=("windows", "packed", "padded"),
    )
    document_tokens: int = option(0, "read at most so many tokens of each document (0 reads all)", minimum=0)
    score_field: str = option("score", "the field or column of JSONL and Parquet that score_min and score_max look at")
    score_min: float | None = option(None, "read only documents whose score is at least this")
    score_max: float | None = option(None, "read only documents whose score is below this")
    shuffle: str = option(
        "global",
        "the order of an epoch: 'global' (any sample may follow any other), 'windowed' (blocks of neighbours, then"
        " samples within a window of blocks, for storage that is slow to reach), 'bucketed' (samples of about one"
        " length together, for data sets that declare lengths) or 'none' (as filed)",
        choices=("global", "windowed", "bucketed", "none"),
    )
    shuffle_block: int = option(2048, "samples in a block of the windowed and the bucketed order", minimum=1)
    shuffle_window: int = option(16, "blocks in a window of the windowed and the bucketed order", minimum=1)
    shuffle_bucket: int = option(
        64, "samples of about one length that the bucketed order keeps together: a global batch, best", minimum=1
    )
    mix: tuple[MixSpec, ...] = option((), "several sources instead of one, each with its weight")

    def parts(self) -> tuple[DataSpec, ...]:
        """Return the data of each source of a mixture, or these data where there is no mixture."""
        return tuple(self._part(each) for each in self.mix) or (self,)

    def _part(self, mix: MixSpec) -> DataSpec:
        """Return the data of one source of the mixture: what it leaves unset is as here."""
        return replace(
            self,
            source=mix.source,
            mix=(),
            include=mix.include or self.include,
            text_field=mix.text_field or self.text_field,
            arguments=mix.arguments or self.arguments,
            score_field=mix.score_field or self.score_field,
            score_min=self.score_min if mix.score_min is None else mix.score_min,
            score_max=self.score_max if mix.score_max is None else mix.score_max,
        )


@dataclass(frozen=True)
class TurnSpec(Declared, table="task.turns"):
    """One of several objectives that take turns in every step, as in a GAN, and the parameters that it trains."""

    name: str = option("", "a short name, under which the journal keeps its loss")
    objective: Any = option("", "'next_token', 'classification' or `package.module:function`", objects=CALLED)
    match: tuple[str, ...] = option(
        (), "patterns of the parameters it trains, `*` for any text; each belongs to the first turn that matches it"
    )
    every: int = option(1, "it has its turn in the first step, and then in every so many", minimum=1)
    clip_norm: float | None = option(
        None, "its own gradient norm above which gradients are scaled down; unset keeps the optimizer's", minimum=0.0
    )


@dataclass(frozen=True)
class Task(Declared, table="task"):
    """What to learn: model, data, objective, optimizer, global batch, stop condition and seed.

    In Python, `model`, `data` and `objective` also take objects: a `torch.nn.Module` or a factory of one, a
    map-style data set, and a function `objective(model, batch) -> (loss_sum, weight)`.
    """

    name: str = option("task", "a short name, used in the journal and the report")
    model: Any = option(factory=ModelSpec, doc="the model", objects=MODELS)
    data: Any = option(factory=DataSpec, doc="the data", objects=DATA_SETS)
    objective: Any = option(
        "auto",
        "'next_token', 'classification', 'regression', 'multi_label', 'seq2seq' (sources and targets, for an"
        " encoder-decoder), 'dpo' (preference pairs, with task.preference),"
        " `package.module:function`, or 'auto' for the data's own; with turns, the name of the one that is evaluated,"
        " 'auto' for the first",
        objects=CALLED,
    )
    preference: PreferenceSpec = option(factory=PreferenceSpec, doc="how preference pairs are learnt from")
    turns: tuple[TurnSpec, ...] = option(
        (), "several objectives that take turns in every step, in this order, each on parameters of its own"
    )
    adapter: AdapterSpec = option(factory=AdapterSpec, doc="small trained matrices beside frozen layers, such as LoRA")
    train: tuple[str, ...] = option(
        (),
        "patterns of the parameters that are trained, `*` for any text, such as 'layers.10.*'; the rest is frozen."
        " Empty trains all of the model, or with an adapter the adapter alone",
    )
    embedding_noise: float = option(
        0.0,
        "noise on the embeddings of tokens while training, drawn for each sample: even over plus and minus this over"
        " the root of tokens times width (NEFTune's alpha, arXiv:2310.05914; 5 is usual, 0 is none)",
        minimum=0.0,
    )
    optimizer: OptimizerSpec = option(factory=OptimizerSpec, doc="the optimizer")
    schedule: ScheduleSpec = option(factory=ScheduleSpec, doc="the learning-rate schedule")
    evaluate: EvaluateSpec = option(factory=EvaluateSpec, doc="what evaluations measure, and what follows from it")
    samples: SamplesSpec = option(factory=SamplesSpec, doc="texts that the model writes while it is trained")
    callbacks: tuple[Any, ...] = option(
        (),
        "your own code at hooks of training: `package.module:Class`, with methods such as after_step(moment), or a"
        " function, which is called after each step",
        objects=CALLBACKS,
    )
    global_batch: Amount = option(
        Amount(131072, "tokens"),
        "samples or tokens in one optimizer update",
        quantity="amount",
        units=("samples", "tokens"),
    )
    batch_rows: str = option(
        "fixed",
        "rows of a global batch in tokens: as many as the longest samples would make (fixed), or, of samples of known"
        " lengths, as many as have that many tokens at most (by_length)",
        choices=BATCH_ROWS,
    )
    growth: GrowthSpec = option(factory=GrowthSpec, doc="whether and how the global batch grows")
    selection: SelectionSpec = option(
        factory=SelectionSpec, doc="whether a step reads more samples than it trains on, and which it chooses"
    )
    stop: Amount = option(Amount(300, "steps"), "when training is complete", quantity="amount")
    seed: int = option(7, "seed of the initial weights, the sample order and dropout", minimum=0)

    def __post_init__(self) -> None:
        """Give data that state no tokenizer that of the model's folder, where it has one."""
        super().__post_init__()
        model, data = self.model, self.data
        if isinstance(model, ModelSpec) and isinstance(data, DataSpec) and not data.states("tokenizer"):
            found = tokenizer_of(model.name)
            if found is not None:
                given = replace(data, tokenizer=str(found))
                object.__setattr__(given, "_stated", data._stated | {"tokenizer"})  # a copy states every option
                object.__setattr__(self, "data", given)

    @property
    def adaptation(self) -> Adaptation:
        """What of the model is trained."""
        return Adaptation(self.adapter, self.train, self.embedding_noise)
