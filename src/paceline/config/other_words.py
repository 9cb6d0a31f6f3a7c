"""The words that other tools have for options of a spec, and what a spec calls them.

A word that is near in its letters is often far in its meaning ("gpus" is no "groups"), so an error names the option
that is meant, by its meaning.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from paceline.errors import suggestion

# What is written -> how it is said here: an option with an example of its value. Words are without "_" and "-".
_OPTIONS: dict[str, str] = {
    option_word: said
    for words, said in (
        ("batch batchsize globalbatchsize trainbatchsize batchsamples batchtokens bs",
         'task.global_batch = "64 samples", of all devices together'),
        ("perdevicetrainbatchsize perdevicebatchsize microbatchsize trainmicrobatchsizepergpu",
         "plan.micro_batch = 8, or nothing: the planner chooses it"),
        ("gradientaccumulation gradientaccumulationsteps accumulategradbatches accumulation",
         "nothing: it follows from task.global_batch and the plan's micro-batch"),
        ("epoch epochs numepochs maxepochs numtrainepochs", 'task.stop = "3 epochs"'),
        ("steps maxsteps numsteps trainsteps iterations maxiters", 'task.stop = "300 steps"'),
        ("learningrate lr", "task.optimizer.lr = 3e-4"),
        ("lrscheduler lrschedulertype scheduler", 'task.schedule.kind = "cosine"'),
        ("warmup warmupsteps warmupratio", 'task.schedule.warmup = "100 steps"'),
        ("wd decay", "task.optimizer.weight_decay = 0.1"),
        ("betas adambetas beta", "task.optimizer.beta1 = 0.9 and task.optimizer.beta2 = 0.95"),
        ("numexperts numlocalexperts nroutedexperts moenumexperts", "task.model.experts = 8"),
        ("numexpertspertok expertspertoken moetopk moeroutertopk", "task.model.top_k = 2"),
        ("classweights classweight posweight", 'task.objective = "my_loss:weighted", a function of your own'),
        ("maxgradnorm gradclip gradientclipping gradientclipval clipgradnorm", "task.optimizer.clip_norm = 1.0"),
        ("optim", 'task.optimizer.name = "adamw"'),
        ("dataset datapath datasetname trainfile traindata", 'task.data.source = "my.csv"'),
        ("maxlength maxseqlength maxseqlen blocksize context contextlength sequencelength", "task.data.seq_len = 512"),
        ("numworkers workers dataloadernumworkers", "nothing: batches are read ahead by themselves"),
        ("bf16 fp16 fp32 amp mixedprecision dtype torchdtype", 'plan.precision = "bf16"'),
        ("gradientcheckpointing activationcheckpointing checkpointing", 'plan.recompute = "full"'),
        ("torchcompile", "plan.compile = true"),
        ("gpus gpu numgpus ngpus nprocpernode numprocesses worldsize ndevices", "cluster.devices = 8"),
        ("accelerator", 'cluster.device = "h100-sxm"'),
        ("zerostage deepspeed fsdp shardingstrategy dataparallelsharddegree", "plan.dp_shard = 8 with plan.zero = 3"),
        ("nosync syncgradients requiresgradientsync", 'plan.gradients = "whole"'),
        ("ddp dp dataparallel dataparallelsize dataparallelreplicatedegree", "plan.dp_replicate = 8"),
        ("tensor tensorparallel tensorparallelsize tpsize tensormodelparallelsize tensorparalleldegree", "plan.tp = 2"),
        ("pipeline pipelineparallel pipelineparallelsize ppsize pipelinemodelparallelsize pipelineparalleldegree",
         "plan.pp = 2"),
        ("contextparallel contextparallelsize cpsize sequenceparallel contextparalleldegree", "plan.cp = 2"),
        ("expertparallel expertparallelsize epsize expertparalleldegree", "plan.ep = 2"),
        ("outputdir outdir logdir savedir rundir workdir", 'run.dir = "runs/mine"'),
        ("savesteps saveevery saveinterval checkpointinterval", 'run.checkpoint_every = "100 steps"'),
        ("evalsteps evalevery evalinterval evaluationstrategy evalstrategy", 'run.evaluate_every = "50 steps"'),
        ("logsteps loggingsteps logevery loginterval", 'run.log_every = "10 steps"'),
        ("savetotallimit", "run.keep_last = 3"),
        ("reportto", "run.exports, such as run.exports.wandb = true"),
        ("earlystopping earlystoppingpatience", "task.evaluate.patience = 3"),
        ("maxtime timeout walltime timelimit", 'run.time_limit = "2 h"'),
        ("resume resumefromcheckpoint ckptpath", "nothing: the same command goes on from the newest checkpoint"),
        ("lora peft", 'task.adapter = { kind = "lora", rank = 16 }'),
        ("lorar lorarank r", "task.adapter.rank = 16"),
        ("loraalpha", "task.adapter.alpha = 32"),
        ("loradropout", "task.adapter.dropout = 0.05"),
        ("targetmodules loratargetmodules", 'task.adapter.targets = ["q_proj", "v_proj"]'),
        ("loadin4bit", 'task.adapter.base_dtype = "nf4"'),
        ("labelcolumn labelcolumnname", 'task.data.label_field = "label"'),
        ("textcolumn textcolumnname datasettextfield", 'task.data.text_field = "text"'),
    )
    for option_word in words.split()
}  # fmt: skip

# What is written -> the option that is meant where the table has it, whatever is meant elsewhere, and an example.
_IN_TABLE: dict[str, tuple[str, str]] = {
    option_word: (option, said)
    for words, option, said in (
        ("params parameters paramnames module modules layers pattern patterns", "match", 'match = ["encoder.*"]'),
        ("kind type class", "name", "did you mean 'name'?"),
        ("context", "cp", "plan.cp = 2"),  # of a plan; of a model or its data it is a length
        ("expert", "ep", "plan.ep = 2"),
        ("lr learningrate lrmult lrmultiplier lrfactor", "lr_scale", "lr_scale = 0.1, a factor of task.optimizer.lr"),
    )
    for option_word in words.split()
}

# Values of other tools -> what is meant here, beside the choices of the option that they were given to.
_VALUES: dict[str, str] = {
    "qlora": 'task.adapter = { kind = "lora", base_dtype = "nf4" }',
    "alllinear": "nothing: without task.adapter.targets every linear layer of the repeated blocks has an adapter",
    "float16": '"fp16"', "half": '"fp16"', "float32": '"fp32"', "float": '"fp32"', "float64": '"fp64"',
    "double": '"fp64"', "bfloat16": '"bf16"', "mixed": '"bf16"', "bf16mixed": '"bf16"', "16mixed": '"fp16"',
    "cheapest": "money", "cost": "money", "price": "money", "fastest": "time", "speed": "time", "throughput": "time",
    "int4": '"nf4"', "4bit": '"nf4"',
    "gpu": '"cuda"', "gpus": '"cuda"', "nvidia": '"cuda"', "cuda:0": '"cuda"',
    "list": "ls", "compare": "diff",  # of checkpoints
    # Schedules of transformers.
    "linearwithwarmup": 'task.schedule = { kind = "linear", warmup = "100 steps" }',
    "constantwithwarmup": 'task.schedule = { kind = "constant", warmup = "100 steps" }',
    "cosinewithwarmup": 'task.schedule = { kind = "cosine", warmup = "100 steps" }',
    "cosinewithminlr": 'task.schedule = { kind = "cosine", final = 0.1 }',
    "warmupstabledecay": 'task.schedule = { kind = "wsd", decay = "100 steps" }',
    "cosinewithrestarts": 'task.schedule.kind = "torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", with its T_0 '
    "in task.schedule.arguments",
    "polynomial": 'task.schedule.kind = "torch.optim.lr_scheduler:PolynomialLR", with its total_iters in '
    "task.schedule.arguments",
    "inversesqrt": "a function of the step: task.schedule.kind = \"my_module:rate\"",
}  # fmt: skip


# Verbs of other tools -> what does that here.
_VERBS: dict[str, str] = {
    verb: said
    for words, said in (
        ("run fit start finetune pretrain sft lora dpo", "paceline train SPEC"),
        ("resume continue restart requeue", "the same `paceline train SPEC` goes on from the newest checkpoint"),
        ("launch torchrun srun sbatch submit distributed",
         "paceline train SPEC, which starts a process for each device; under torchrun or srun it takes theirs"),
        ("tune sweep search hpo grid optimize lrfind",
         "`paceline train SPEC --set task.optimizer.lr=1e-3 --run-dir runs/lr-1e-3` for each value, "
         "then paceline compare runs/lr-*"),
        ("predict infer inference generate serve sample chat",
         "paceline export RUN OUT: what loads that folder stands in docs/guide/predicting.md"),
        ("eval test validate score", "paceline evaluate RUN, or paceline evaluate RUN SOURCE with a test set"),
        ("merge", "paceline export RUN OUT --merge"),
        ("watch monitor status top ui ls list runs", "paceline dash RUNS; in a terminal paceline logs RUN --follow"),
        ("tail follow log", "paceline logs RUN --follow"),
        ("tensorboard wandb mlflow", "paceline deliver RUN, or run.exports and run.tensorboard in the spec"),
        ("stop kill cancel pause",
         "Ctrl-C, or kill -TERM of the process that RUN/lock names: it saves a checkpoint first"),
        ("prune clean gc", "run.keep_last in the spec; a folder checkpoints/step-N may be removed by hand"),
        ("init new create config",
         "a spec file of some ten lines: docs/guide/spec-files.md; `paceline schema` completes it"),
        ("convert", "paceline checkpoint convert PATH OUT"),
        ("inspect tokenize tokenise prepare", "paceline data inspect SOURCE, or paceline data prepare SOURCE OUT"),
        ("profile", "paceline trace RUN, of a job that runs"),
        ("cost price estimate memory forecast lint", "paceline plan SPEC"),
        ("explain why advice advise recommend suggest breakdown", "paceline plan SPEC --explain"),
        ("diff", "paceline compare RUN RUN, or paceline checkpoint diff PATH PATH"),
        ("money invoice budget spent", "paceline bill RUNS"),
        ("prove", "paceline verify SPEC"),
        ("env info version devices", "paceline doctor"),
    )
    for verb in words.split()
}  # fmt: skip

# Options of other command lines -> the options, and the arguments that are written without one, that may be meant.
_OF_COMMANDS: dict[str, tuple[str, ...]] = {
    option_word: tuple(meant.split())
    for words, meant in (
        ("outdir outputdir outputpath savedir", "--run-dir OUT --export --csv --picture"),
        ("out output o outfile outputfile save saveto saveas file filename tofile", "OUT --export --csv --picture"),
        ("html page", "--export"),
        ("png svg figure plot image", "--picture"),
        ("run rundir runname rundirectory", "RUN RUN_DIR RUNS --run-dir"),
        ("spec config cfg configfile toml yaml", "SPEC"),
        ("data dataset source input testset testfile", "SOURCE"),
        ("checkpoint ckpt checkpointpath best iteration epoch", "--step"),
        ("maxsamples numsamples nsamples limit maxexamples subset", "--samples"),
        ("tail n lines", "--last"),
        ("watch f live", "--follow"),
        ("address bind ip interface listen", "--host"),
        ("gpus ngpus numgpus worldsize nprocpernode numprocesses", "--devices"),
        ("from start begin", "--since"),
        ("end before", "--until"),
        ("groupby group", "--by"),
        ("verbose v details why", "--explain --all"),
    )
    for option_word in words.split()
}  # fmt: skip
TYPING_ERROR = 0.7  # as alike as a word and the same with an error of typing: "out" and "port" are 0.57


def verb_meant(word: str, verbs: Iterable[str]) -> str:
    """Return what to write for a verb that there is not: that of its meaning, the nearest, or the way to a file."""
    if said := _VERBS.get(_plain(word)):
        return said
    if word.endswith(".toml"):
        return f"paceline train {word}, or paceline plan {word}"
    return f"python {word}" if word.endswith(".py") else suggestion(word, verbs)


def option_meant(word: str, near: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Return what to write for an option that there is not: "did you mean 'x'?", or the names that there are.

    `elsewhere` are the whole names of options that are called so in another table.
    """
    near, elsewhere, written = list(near), list(elsewhere), _plain(word)
    option, here = _IN_TABLE.get(written, ("", ""))
    if option in near:
        return here
    said = "" if any(_plain(name) == written for name in near) else _OPTIONS.get(written, "")
    if said and not any(name in said for name in elsewhere):
        return said
    for name in sorted(elsewhere, key=lambda name: name not in said):
        return f"did you mean '{name}'?"
    return suggestion(word, near)


def said_elsewhere(word: str) -> str | None:
    """Return how a spec says an option of another tool, such as `batch_size` or `--batch-size`; None of other words."""
    return _OPTIONS.get(_plain(word))


def command_option_meant(word: str, options: Iterable[str], arguments: Iterable[str] = ()) -> str | None:
    """Return which of a verb's options is meant by one that there is not: by meaning, a part of its name or a slip.

    `arguments` are those that are written without an option. None where nothing is like the word.
    """
    there = [*options, *arguments]
    for meant in _OF_COMMANDS.get(_plain(word), ()):
        if meant in there:
            return f"did you mean '{meant}'?" if meant.startswith("-") else f"{meant} is written without an option"
    bare = {option.lstrip("-"): option for option in options}
    written = word.lstrip("-")
    parts = [name for name in bare if written in name.split("-") and _plain(word) not in _OF_COMMANDS]
    near = parts or difflib.get_close_matches(written, sorted(bare), n=1, cutoff=TYPING_ERROR)
    return f"did you mean '{bare[near[0]]}'?" if near else None


def choice_meant(word: str, choices: Iterable[str]) -> str:
    """Return what to write for a choice that there is not. A meaning counts where the choices have it."""
    known = [choice for choice in choices if choice]
    said = _VALUES.get(_plain(word))
    if said and "=" in said:
        return said
    if said and said.strip('"') in known:
        return f"did you mean '{said.strip(chr(34))}'?"
    return suggestion(word, known)


def _plain(word: str) -> str:
    return re.sub(r"[-_.]", "", word).lower()
