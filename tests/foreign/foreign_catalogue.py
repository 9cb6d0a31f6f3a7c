"""The table's rows: every foreign model, its data and its objective, by import path, and what is special about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import models_huggingface
import models_newest
import models_odd
import models_own
import models_peculiar
import models_strange
import models_stranger
import models_unusual

UNUSUAL, HF, DATA = "models_unusual:", "models_huggingface:", "foreign_data:"
MODULES = (models_own, models_unusual, models_strange, models_stranger, models_odd, models_peculiar,
           models_newest)  # fmt: skip


@dataclass(frozen=True)
class Foreign:
    """A model that nobody here wrote for Paceline, or a program of a kind that others write."""

    name: str
    what: str
    model: str
    data: str
    objective: str = "classification"
    arguments: dict[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[str, str, str], ...] = ()  # (name, objective, pattern of the parameters that it trains)
    random: bool = False  # draws random numbers as it trains: a plain loop draws others
    slice: bool = False  # in `make test` too

    @property
    def kind(self) -> str:
        """Where it is from."""
        return "Hugging Face" if self.model.startswith(HF) else "own"


def _own(name: str, what: str, model: str, data: str, objective: str = "classification", **more: Any) -> Foreign:
    objective = objective if objective in ("classification", "next_token") else _module_of(objective) + objective
    return Foreign(name, what, _module_of(model) + model, DATA + data, objective, **more)


def _module_of(name: str) -> str:
    """Return the module that has a program, with a colon: an import path begins so."""
    return f"{next(module for module in MODULES if hasattr(module, name)).__name__}:"


OWN_MODELS = (
    _own("U-Net", "skip connections, transposed convolutions", "UNet", "images", "denoised"),
    _own("GRU", "two recurrent layers in one module", "Recurrent", "next_tokens", "next_token"),
    _own("LSTM", "the same with cells", "Recurrent", "next_tokens", "next_token", arguments={"kind": "LSTM"}),
    _own("nn.TransformerEncoder", "torch's own layers, causal mask", "Encoder", "next_tokens", "next_token"),
    _own("contrastive (InfoNCE)", "each row's loss depends on all others", "Towers", "vectors", "info_nce"),
    _own("a mean, not a sum", "`objective` returns (mean, 1)", "Classifier", "vectors", "mean_of_rows"),
    _own("BatchNorm", "statistics over the batch", "batch_norm", "images", slice=True),
    _own("SyncBatchNorm", "the same over the rows of all ranks", "synced_batch_norm", "images"),
    _own("BatchNorm by hand", "the same, in no class of that name", "HandBatchNorm", "vectors"),
    _own("moving average", "a buffer that every forward pass updates", "MovingAverage", "vectors"),
    _own("counter", "an integer buffer counts forward passes", "Counter", "vectors"),
    _own("unused parameters", "a layer without gradient, a scalar", "Unused", "vectors"),
    _own("frozen blocks", "two of three blocks without gradient", "Frozen", "vectors"),
    _own("LoRA", "frozen layers and low-rank additions", "lora", "vectors"),
    _own("shared blocks", "one block three times in a list", "SharedBlocks", "vectors"),
    _own("tied across blocks", "three blocks with one common weight", "TiedAcross", "vectors"),
    _own("distillation", "a frozen teacher inside the model", "Distilled", "vectors", "distillation"),
    _own("siamese", "the objective calls the model twice", "Siamese", "vectors", "siamese"),
    _own("tied autoencoder", "a weight and its transpose", "Autoencoder", "vectors", "reconstruction"),
    _own("`model.encode`", "the objective calls another method too", "Autoencoder", "vectors", "sparse_reconstruction"),
    _own("experts in a list", "the rows choose which run", "ListedExperts", "vectors"),
    _own("complex weights", "a Fourier layer, complex parameters", "ComplexWeights", "signals", "signal_error"),
    _own("FFT", "view_as_complex of real weights", "Fourier", "signals", "signal_error"),
    _own("complex rotary buffer", "Meta's rotary code", "ComplexRotary", "next_tokens", "next_token"),
    _own("spectral norm", "power iterations in every forward pass", "spectral", "vectors"),
    _own("weight norm", "parametrised weights", "weight_normed", "vectors"),
    _own("channels last", "convolutions in another memory order", "channels_last", "images"),
    _own("transposed weights", "parameters that are views", "Transposed", "vectors"),
    _own("custom Function", "rounding, straight-through gradient", "CustomFunction", "vectors"),
    _own("data-dependent branch", "`.any()`, `nonzero`, `.item()`", "Branching", "vectors"),
    _own("fixed point", "iterated until all rows settle", "Iterated", "vectors"),
    _own("stochastic depth", "`if torch.rand(()) < p`", "Depth", "vectors", random=True),
    _own("dropout", "masks", "Dropped", "vectors", random=True),
    _own("dropout in attention", "nn.TransformerEncoder", "Encoder", "next_tokens", "next_token",
         arguments={"dropout": 0.1}, random=True),
    _own("VAE", "noise in the forward pass", "VAE", "vectors", "elbo", random=True),
    _own("diffusion", "noise in the objective", "UNet", "images", "diffusion", random=True),
    _own("adversarial", "generator and discriminator, reversed gradient", "Adversarial", "vectors", "adversarial"),
    _own("GAN", "two objectives in turn, each of its own net", "Gan", "vectors", "told_apart",
         turns=(("discriminator", UNUSUAL + "told_apart", "discriminator.*"),
                ("generator", UNUSUAL + "passed_off", "generator.*")), slice=True),
    _own("gradient penalty", "a backward pass inside the objective", "Smooth", "vectors", "gradient_penalty"),
    _own("ragged rows", "lengths weigh rows", "Ragged", "ragged", "ragged_loss"),
    _own("graph network", "messages along edges", "Graph", "graphs", "graph_loss"),
    _own("neural ODE", "one network called sixteen times", "Flow", "vectors"),
    _own("fused attention", "one matrix for q, k and v; no rules", "FusedAttention", "next_tokens", "tokens_loss"),
    _own("cosine classifier", "a learned temperature, a scalar", "Cosine", "vectors"),
    _own("mixture density", "the likelihood of a mixture", "MixtureDensity", "vectors", "mixture_loss"),
    _own("CTC", "transcripts of different lengths", "Speech", "sounds", "ctc"),
    _own("weighted classes", "weights that are no whole numbers, smoothed labels", "Classifier", "vectors",
         "weighted_classes"),
    _own("triplets", "one encoder called three times, a hinge", "Classifier", "vectors", "triplet"),
    _own("mixup", "rows are mixed with other rows by chance", "Classifier", "vectors", "mixed_up", random=True),
    _own("sharpness-aware", "two passes in one objective", "Classifier", "vectors", "sharpness_aware"),
    _own("hard examples", "the harder half of the rows", "Classifier", "vectors", "hardest"),
    _own("forward mode", "`torch.func.jvp` in the objective", "Smooth", "vectors", "steep"),
    _own("packed LSTM", "sequences packed by their lengths, both ways", "PackedLSTM", "ragged", "by_length"),
    _own("LSTMCell", "a cell fed its own output", "Cells", "vectors"),
    _own("scatter", "messages along a list of edges, index_add", "Scattered", "graphs", "scattered_loss"),
    _own("dictionary", "outputs in a dictionary with tuples", "Named", "vectors", "of_named"),
    _own("own loss", "the model returns a mean, times rows", "OwnLoss", "vectors", "times_rows"),
    _own("loss from a hook", "left on the model in forward", "Hooked", "vectors", "with_activity"),
    _own("hypernetwork", "weights are another network's output", "Hyper", "vectors"),
    _own("standardised weights", "convolutions with weights made in forward", "Standardised", "images"),
    _own("orthogonal weights", "a parametrisation by a matrix exponential", "orthogonal_layers", "vectors"),
    _own("max_norm", "an embedding that shortens its rows in place", "Renormed", "next_tokens", "next_token"),
    _own("clamped weights", "changed in place in forward", "Clamped", "vectors"),
    _own("whole numbers", "an integer parameter, an empty one", "Numbered", "vectors"),
    _own("masked gradient", "a hook on a parameter", "MaskedGradient", "vectors"),
    _own("backward hook", "a hook on a block changes its gradient", "Doubled", "vectors"),
    _own("own checkpointing", "torch.utils.checkpoint, both ways", "Recomputed", "vectors"),
    _own("strided gradients", "a Function whose gradients are views", "Strided", "vectors"),
    _own("an fp32 part", "a gate in fp32 inside of the model", "Narrow", "vectors"),
    _own("queue", "keys of earlier rows in a buffer", "Queue", "vectors", "told_from_queue"),
    _own("quantised", "nearest codes, straight-through", "Quantised", "vectors", "quantised_loss"),
    _own("slow copy", "frozen weights that follow in forward", "Bootstrap", "vectors", "dissimilarity"),
    _own("masked autoencoder", "chance hides patches", "MaskedAutoencoder", "images", "of_hidden", random=True),
    _own("drop path", "blocks left out by row", "DropPath", "vectors", random=True),
)  # fmt: skip

# Programs beside the table, held by test_odd_programs.py: parts of torch that few use.
ODD_PROGRAMS = (
    _own("sequence first", "torch's attention, samples in the second dimension", "SequenceFirst", "next_tokens",
         "next_token"),
    _own("nested tensors", "torch's encoder with padding", "Unpadded", "masked_tokens", "unhidden"),
    _own("bags", "means of embeddings of one flat list", "Bags", "next_tokens", "next_token"),
    _own("odd layers", "InstanceNorm, PReLU, Bilinear, Conv3d", "Zoo", "vectors"),
    _own("sparse buffer", "a sparse matrix mixes features", "SparseGraph", "vectors"),
    _own("lists of weights", "ParameterList, ParameterDict, one none, one twice", "Kept", "vectors"),
    _own("ensemble", "`vmap` over stacked weights", "Ensemble", "vectors"),
    _own("inner steps", "`torch.func.grad` for every row", "Learner", "vectors"),
    _own("implicit layer", "a Function that calls autograd in its backward pass", "Implicit", "vectors"),
    _own("dropout computed again", "checkpointing inside of the model", "DropsAgain", "vectors", random=True),
    _own("symmetric weight", "a parametrisation, cached", "symmetric", "vectors"),
    _own("weight norm by hooks", "torch.nn.utils.weight_norm", "hooked_weight_norm", "vectors"),
    _own("spectral norm by hooks", "torch.nn.utils.spectral_norm", "hooked_spectral_norm", "vectors"),
    _own("pruned", "masks before each forward pass", "pruned", "vectors"),
    _own("curriculum", "shapes by the number of calls", "Curriculum", "vectors"),
    _own("remembers", "earlier rows in a list of Python's", "Remembers", "vectors"),
    _own("in turn", "a branch by the number of calls", "InTurn", "vectors"),
    _own("by rows", "divides by the number of rows", "ByRows", "vectors"),
    _own("numpy noise", "noise of numpy's generator", "NumpyNoise", "vectors", random=True),
    _own("Python's chance", "a block left out by `random.random()`", "PythonChance", "vectors", random=True),
    _own("in place", "inputs are changed", "InPlace", "vectors"),
    _own("hook on sums", "`register_post_accumulate_grad_hook`", "scaled_when_there", "vectors"),
    _own("hook on hidden states", "a gradient is halved on its way", "Rescaled", "vectors"),
    _own("compiled part", "`torch.compile` of one layer", "Compiled", "vectors"),
    _own("named tuple", "arguments by name alone, a tuple of names", "Tuples", "vectors", "of_tuples"),
    _own("penalty for each row", "all weights in the objective", "Classifier", "vectors", "with_penalty"),
    _own("one penalty", "the same, however many rows there are", "Classifier", "vectors", "with_one_penalty"),
    _own("fixed projection", "drawn when it is made, in a plain attribute", "Fixed", "vectors"),
    _own("numpy's choice", "features that numpy chooses when it is made", "NumpyMask", "vectors", random=True),
    _own("Python's order", "features that Python shuffles when it is made", "PythonOrder", "vectors", random=True),
    _own("late head", "made in the first forward pass", "LateHead", "vectors"),
    _own("first batch", "shift and scale by the rows that it sees first", "ActNorm", "vectors"),
    _own("random weights", "drawn in each forward pass, for all rows", "Bayes", "vectors", random=True),
    _own("REINFORCE", "drawn actions, less the mean reward of the batch", "Classifier", "vectors", "reinforced",
         random=True),
    _own("RReLU", "drawn slopes", "Noisy", "vectors", random=True),
    _own("by frequency", "`scale_grad_by_freq` of an embedding", "ByFrequency", "next_tokens", "next_token"),
    _own("mean in the backward pass", "a Function divides by the rows there alone", "Meaned", "vectors"),
    _own("adaptive softmax", "clusters of tokens that many a batch lacks", "Adaptive", "next_tokens", "adaptive_loss"),
    _own("sparse codes", "counts since when a code is idle", "SparseCodes", "vectors"),
    _own("annealing", "an objective that counts its calls", "Classifier", "vectors", "annealed"),
    _own("flat parameter", "all weights are views of one", "Flat", "vectors"),
    _own("two names", "a module by two names, a layer of it by a third", "TwoNames", "vectors"),
    _own("thawing", "requires_grad by the number of calls", "Thawing", "vectors"),
    _own("forces", "the loss is of a gradient by the inputs", "Forces", "vectors", "forces_error"),
    _own("reversible", "a Function that computes its inputs again", "Reversible", "vectors"),
    _own("gradient meter", "a backward hook moves a buffer that the forward pass reads", "GradientMeter", "vectors"),
    _own("nested recompute", "checkpointing inside of checkpointing", "Nested", "vectors"),
    _own("extra state", "a number in the state dict", "ExtraState", "vectors"),
    _own("counts evaluations", "a buffer that only evaluations move", "SeenInEvaluation", "vectors"),
    _own("dataclass", "outputs in a class that torch does not know", "Dataclassed", "vectors", "of_dataclass"),
    _own("units", "a class with `__torch_function__`", "Units", "vectors"),
    _own("expert choice", "experts choose among the rows that are there", "ChosenTokens", "vectors"),
    _own("unique tokens", "each token of a batch is computed once", "UniqueTokens", "next_tokens", "next_token"),
    _own("nn.Transformer", "torch's encoder and decoder in one", "Translator", "next_tokens", "next_token"),
)  # fmt: skip

# The same, of kinds that nobody had brought: other ways to build a module, to hand it rows, to sum up a loss.
NEWEST_PROGRAMS = (
    _own("scripted blocks", "`torch.jit.script`", "scripted", "vectors"),
    _own("traced graph", "`torch.fx.symbolic_trace`", "of_a_graph", "vectors"),
    _own("lazy layers", "made by a first row in the factory", "lazy", "vectors"),
    _own("two parametrisations", "one after the other, of a layer in two places", "parametrised_twice", "vectors"),
    _own("shared by three", "embedding, head and a list hold one weight", "SharedByThree", "next_tokens", "next_token"),
    _own("hooks on values", "before and after blocks", "PreHooked", "vectors"),
    _own("weight as a property", "the product of two, and a parameter that is none", "Computed", "vectors"),
    _own("growing table", "a buffer that is not saved grows in forward", "Cached", "next_tokens", "next_token"),
    _own("functional call", "`torch.func.functional_call` with moved weights", "Functional", "vectors"),
    _own("checkpoint_sequential", "and `save_on_cpu`", "Segments", "vectors"),
    _own("diagonal states", "complex poles, a convolution by FFT", "Diagonal", "next_tokens", "next_token"),
    _own("slot attention", "learnt queries compete, by a GRU cell", "Slots", "vectors"),
    _own("mixture of depths", "top tokens of each row", "Depths", "next_tokens", "next_token"),
    _own("patches", "unfold, depth-wise, pixel shuffle, resize", "Windows", "images"),
    _own("spatial transformer", "affine_grid, grid_sample", "Straightened", "images"),
    _own("linear algebra", "Cholesky and eigenvalues for each row", "Solved", "vectors"),
    _own("grouped attention", "`enable_gqa`, RMSNorm, a gate", "Grouped", "next_tokens", "next_token"),
    _own("splines", "hat functions on a grid", "Splines", "vectors"),
    _own("scatter_reduce", "largest of groups, logcumsumexp", "Reduced", "vectors"),
    _own("Function with a context", "setup_context, vmap, an output without gradient", "Bounded", "vectors"),
    _own("dropout in evaluations", "of whole channels too", "AlwaysDrops", "vectors", random=True),
    _own("Gumbel choice", "and a distribution's rsample", "Gumbel", "vectors", random=True),
    _own("jacobian in forward", "`vmap` of `jacrev`", "CheckedFunction", "vectors"),
    _own("inputs by name", "a nested dictionary, keyword-only", "NamedInputs", "named_rows", "by_names"),
    _own("outcome", "a class with a dictionary of tuples", "Outcomes", "vectors", "of_outcomes"),
    _own("CRF", "the sum over all paths, a loop over places", "SharedByThree", "next_tokens", "chained"),
    _own("focal loss", "weights that follow from the model", "Classifier", "vectors", "focal"),
    _own("survival", "each row against those that live longer", "Classifier", "vectors", "survival"),
    _own("Dice", "the overlap of all rows together", "Classifier", "vectors", "dice"),
    _own("a mean of z-losses", "in a sum", "Classifier", "vectors", "with_z_loss"),
    _own("views in place", "logits are changed through views", "Classifier", "vectors", "moved_views"),
)  # fmt: skip

HF_MODELS = (
    *(
        Foreign(family, "causal language model", HF + "causal", DATA + "next_tokens", "next_token",
                {"family": family}, slice=family == "Olmo2")
        for family in models_huggingface.CAUSAL
    ),
    Foreign("T5", "encoder and decoder", HF + "t5", DATA + "sequence_pairs", HF + "translated"),
    Foreign("BERT", "masked tokens, padding", HF + "bert", DATA + "masked_tokens", HF + "unmasked"),
    Foreign("ViT", "images", HF + "vit", DATA + "images"),
    Foreign("ConvNeXt", "images", HF + "convnext", DATA + "images"),
    Foreign("CLIP", "contrastive: rows depend on each other", HF + "clip", DATA + "captions", HF + "contrasted"),
    Foreign("Whisper", "sound, encoder and decoder", HF + "whisper", DATA + "sounds", HF + "transcribed"),
)  # fmt: skip

# Families beside the table, held by test_odd_programs.py.
MORE_FAMILIES = (
    *(
        Foreign(family, "causal language model", HF + "causal", DATA + "next_tokens", "next_token", {"family": family})
        for family in models_huggingface.MORE
    ),
    *(
        Foreign(name, "causal language model", HF + "drawing", DATA + "next_tokens", "next_token", {"name": name},
                random=True, slice=name == "Mixtral with noise")
        for name in models_huggingface.DRAWING
    ),
    Foreign("T5 with dropout", "encoder and decoder", HF + "t5", DATA + "sequence_pairs", HF + "translated",
            {"dropout": 0.1}, random=True),
    Foreign("Switch", "experts, dropout, noise before routers", HF + "switch", DATA + "sequence_pairs",
            HF + "translated", random=True),
    Foreign("BERT with dropout", "masked tokens, padding", HF + "bert", DATA + "masked_tokens", HF + "unmasked",
            {"dropout": 0.1}, random=True),
)  # fmt: skip

ROWS = (*HF_MODELS, *OWN_MODELS)
