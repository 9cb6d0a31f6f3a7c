"""What `--json` writes: for every action of every verb the keys of its one object, declared once.

The tests hold what is written against it, and docs/reference/json.md is made of it. A key that is taken away, or
means something else, makes another FORMAT; a key that is added does not.
"""

from __future__ import annotations

FORMAT = 1
ALWAYS = {
    "format": f"{FORMAT}, the version of these objects: keys may be added within it",
    "exit_code": "of the process, as without --json",
}
ERROR = "any verb, when it fails"
BARE = {
    "paceline schema": "the JSON schema of spec files itself",
    "paceline backtest --fit": "the constants that were fitted, as the file holds them",
}

PLAN = "paceline plan"
COMPARED = "paceline plan --devices N,N"
GROUPED = "paceline plan, with [cluster.groups]"
PROVENANCE = "paceline plan --provenance"
MODELS = "paceline plan --models"
SIMULATE = "paceline simulate"
VERIFY = "paceline verify"
TRAIN = "paceline train"
TRACE = "paceline trace"
DELIVER = "paceline deliver"
REPORT = "paceline report"
LOGS = "paceline logs"
BILL = "paceline bill"
ALERTS, ALERTS_TEST = "paceline alerts list", "paceline alerts test"
ALERTS_RULES, ALERTS_SILENCE = "paceline alerts rules", "paceline alerts silence"
DASH, COMPARED_RUNS = "paceline dash", "paceline compare"
EXPORT, EVALUATE = "paceline export", "paceline evaluate"
LIST, SHOW, CHECK = "paceline checkpoint ls", "paceline checkpoint show", "paceline checkpoint verify"
COMPARE, CONVERT = "paceline checkpoint diff", "paceline checkpoint convert"
BACKTEST, LEFT_OUT = "paceline backtest", "paceline backtest --leave-one-source-out"
PREPARE, SCORE = "paceline data prepare", "paceline data score"
COPIES, INSPECT = "paceline data copies", "paceline data inspect"
INSPECT_IMAGES = "paceline data inspect, of images"
DOCTOR = "paceline doctor"
BENCH = "paceline bench data"
PROBE, FORGET = "paceline probe", "paceline probe --forget"

# Keys by action, and what each holds. A key that ends in ? is there with some options or for some tasks only.
SHAPES: dict[str, dict[str, str]] = {
    ERROR: {
        "error": "the kind of error, such as `ConfigError`",
        "what": "what happened",
        "because": "because of what",
        "try": "what to try",
        "evidence?": "figures of it, of an error that has some",
        "errors?": "each of several mistakes, with the same keys",
        "traceback?": "of a defect",
    },
    PLAN: {
        "plan": "the chosen plan: `layout` (degree of each axis), `zero`, `micro_batch`, `accumulation` and the rest",
        "plan_text": "the plan in one line",
        "because": "why this one, in words",
        "forecast": "what it takes: `step_seconds`, `peak_bytes`, `run_seconds`, `usd`, `kwh` and `carbon_g`, each with"
        " `value`, 80 % and 95 % intervals and `source`, the terms `time` and `memory`, and the rest of the journal's"
        " `forecast`",
        "expected": "the run under failures and preemption: `wall_seconds`, `goodput`, `interruptions`, `usd`, `terms`;"
        " null where nothing is known of them",
        "remarks": "what is to be said of the task, the cluster or the plan, a text each",
        "fits": "how many plans fit",
        "refusals": "how many were refused",
        "candidates": "the ten best plans that fit, or with `--all` a thousand: `plan` in words, `step_seconds`,"
        " `peak_bytes`, `usd` and `kwh`",
        "refused": "the first ten that were refused, or with `--all` a thousand: `plan` in words and `because`",
        "contest": "how sure the choice is: `contenders` (plans worth a try), `compared`, `regret`, `regret_tried`",
        "pareto": "plans that no other one beats in all of `over`",
        "learnt": "the finished runs that the forecast learnt from; null where there are none",
        "placement": "where ranks stand, and what each axis sends",
        "hours": "of `run.when`: `window`, `is_open`, when that `changes`, when the run `ends` and `ends_at_once`,"
        " tariff and carbon of a kWh in both, `usd_saved` (of electricity) and `carbon_kg_saved`; moments in seconds"
        " since the epoch, null for what is not known; null where a run trains at any hour",
        "cluster": "the machines: every figure with `value`, `source` and `note`",
        "facts": "the data: `description`, `samples`, `items_per_sample`, `unit`, `fingerprint`",
        "parameters": "of the model, shared ones once",
        "batch_samples": "samples in one update",
        "steps": "updates until the task is complete",
        "spec": "the tables `task`, `cluster`, `plan` and `run` with every default filled in",
        "budget_error?": "of a plan that `train` refuses for its budget: `error`, `what`, `because`, `try` and"
        " `exit_code`, which is the command's",
        "alternatives?": "with `--explain` the best plan on the other side of every choice",
        "sensitivity?": "with `--explain` what would change the choice",
        "profile?": "with `--all` the model as a chain of blocks",
    },
    COMPARED: {
        "rows": "a cluster each: device, devices, finish, money, whether limits are kept, and `planned` (plan,"
        " forecast, expected, cluster, remarks)",
        "best": "the number of the best row",
        "front": "in what no other row is better than those of the front",
        "with_failures": "whether failures are counted in",
        "spec": "as of `paceline plan`",
    },
    GROUPED: {
        "ways": "ways to use all groups, the best first: the parts of each, with plans and forecasts",
        "joint": "one layout over all groups; null where none fits",
        "refused": "why other ways are none",
        "groups": "the groups: devices and cluster of each",
        "remarks": "what is to be said of the task or the clusters, a text each",
        "facts": "the data, as of `paceline plan`",
        "batch_samples": "samples in one update",
        "steps": "updates until the task is complete",
        "spec": "as of `paceline plan`",
        "budget_error?": "as of `paceline plan`",
    },
    PROVENANCE: {"spec": "as of `paceline plan`", "provenance": "where each value is from"},
    MODELS: {"models": "named sizes: their shape and `parameters`"},
    SIMULATE: {
        "scenario": "the job, its machines and how they fail",
        "mtbf_seconds": "mean time between failures of the whole job",
        "runs": "simulated runs of each policy",
        "seed": "of their failures",
        "policies": "each with its settings, and of its runs finish, goodput, interruptions, money and energy",
        "intervals": "goodput by the interval between checkpoints; null without `--intervals`",
        "measured": "a measured run against the simulation; null without `--measured`",
    },
    VERIFY: {
        "equal": "whether all layouts that can be had are equal to one device",
        "layouts": "the proof of each, as the journal's `verify` record has it",
    },
    TRAIN: {"run_dir": "the run's directory", "report": "as of `paceline report`; null where there is none"},
    DELIVER: {
        "run_dir": "the run's directory; null where files alone were written",
        "delivered": "the tools that have got all of its journal",
        "left": "the tools that have not; the exit code is 74 then",
        "files": "alert rules and dashboard, where they were asked for",
    },
    TRACE: {
        "run_dir": "the run's directory",
        "asked": "whether a trace was asked for",
        "traces": "of each rank `path`, steps (`first`, `last`), `step_seconds`, `classes` of work beside their"
        " forecast, `communication_seconds`, `hidden_seconds`, `gaps` by phase, and `grown` tensors; empty where nobody"
        " waits",
    },
    REPORT: {
        "page": "the file that was written",
        "...": "everything that the page shows: `status`, `promises` (forecast, measured, error), `losses`, `goodput`,"
        " `bound`, `phases`, `decisions`, `faults` and the rest of `paceline.report(...).as_dict()`",
    },
    LOGS: {
        "failure": "what failed first in the newest start: `rank`, `what`, `because`, `traceback`; null without one",
        "ranks": "ranks that have logs",
        "lines": "by their moments: `rank`, `time` (UTC), `stream` (`out` or `err`) and `text`",
    },
    BILL: {
        "by": "what is added up by",
        "rows": "groups, dearest first: amounts and shares",
        "total": "of all",
        "how": "where the rates of each amount are from",
        "runs": "how many runs were counted",
        "tags": "the tags that some run has, each a group",
        "shared": "nodes that had several of the runs at once, and for how many seconds",
    },
    ALERTS: {
        "alerts": "those on record, oldest first: `run`, and the journal's `alert` record",
        "firing": "how many fire still",
    },
    ALERTS_TEST: {
        "sinks": "each with `name`, whether it took the `sent` message, and `because` where it did not",
        "replayed": "of a run's directory what the rules find in its journal; else empty",
    },
    ALERTS_RULES: {"rules": "each with `rule`, `severity` and when it fires (`fires`)"},
    ALERTS_SILENCE: {"silences": "until when each rule is silenced, in seconds since the epoch; `*` is all"},
    DASH: {
        "url?": "where the page is, for this machine's browser; the command goes on to serve it",
        "url_with_token?": "the same with the token, which other machines' browsers need once",
        "page?": "with `--export` the file that was written",
        "runs?": "with `--export` how many runs it shows",
    },
    COMPARED_RUNS: {
        "runs": "of each run `name`, `status`, `steps`, `loss`, `held_out`, `step_seconds`, `items_per_second`,"
        " `peak_bytes`, `device_hours`, `usd`, `kwh`, `plan`, and the `group` of runs that differ by their seed alone",
        "figures": "how each run differs from the first: `figure`, `difference`, `relative`, `plus_minus` (half of a"
        " 95 % interval), `sure` (of the sign, 0.5 to 1), the `noise` it is from, and which run is `better`",
        "differences": "`name` and `values` of what is not the same in spec, plan, data and versions",
        "step": "the last one that all runs have",
        "last_steps": "how many steps up to it the losses are means of",
        "held_out_step": "the last step after which all were evaluated, null where there is none",
        "note": "what noise is known",
        "curves": "of each run loss and seconds over steps, thinned for drawing: `points`, `total`, `missing`",
    },
    EXPORT: {
        "run_dir": "the run's directory",
        "checkpoint": "the checkpoint that was read",
        "step": "its step",
        "out": "the folder that was written",
        "weights_format": "`huggingface`, or `paceline` where the names are the module's own",
        "architecture": "the class of transformers that reads them; empty where there is none",
        "files": "the names of the files",
        "bytes": "their size",
        "skipped": "why newer checkpoints were not read",
    },
    EVALUATE: {
        "run_dir": "the run's directory",
        "checkpoint": "the checkpoint that was read",
        "step": "its step",
        "source": "the data; empty of what the run held out",
        "samples": "how many were read",
        "of_samples": "how many there are",
        "loss": "the mean loss of an item",
        "weight": "how many items it is over",
        "metrics": "by name",
        "seconds": "what it took, without building the model",
        "skipped": "why newer checkpoints were not read",
    },
    LIST: {"checkpoints": "complete ones, the newest first", "skipped": "why others are none"},
    SHOW: {
        "listed": "path, step, bytes, ranks, layout",
        "position": "samples consumed",
        "task": "the task's name",
        "fingerprint": "of the data",
        "plan": "the plan in one line",
        "versions": "of what wrote it",
        "bytes_of": "bytes of the weights, of the optimizer's state and of what else there is",
        "tensors": "name to dtype and shape",
    },
    CHECK: {"checkpoints": "each with `path`, whether it is sound, and what was not checked"},
    COMPARE: {
        "first": "the one checkpoint",
        "second": "the other one",
        "options": "options of the spec that differ",
        "tensors": "names that are in one alone, and tensors that differ",
    },
    CONVERT: {
        "source": "what was read",
        "out": "what was written",
        "files": "its files",
        "left_out": "what has no place in the other format",
        "warning": "what to know of it",
    },
    BACKTEST: {
        "constants_sha256": "of the constants that forecasts use",
        "files": "the scores of each table",
        "by?": "with `--by` the scores of parts",
        "anchored?": "with `--anchor` the scores of the rest of every series",
    },
    LEFT_OUT: {
        "leave_one_source_out": "scores by constants fitted without each source",
        "files": "the scores of each table",
    },
    PREPARE: {
        "folder": "where the shards are",
        "made": "whether they were made now",
        "fingerprint": "of the tokens",
        "card": "where they are from",
    },
    SCORE: {
        "out": "the file that was written",
        "checkpoint": "the checkpoint whose model scored",
        "step": "its step",
        "by": "`loss`, `uncertainty` or `core`",
        "documents": "how many were scored",
        "quantiles": "of the scores",
        "core": "of a core set its `documents`, `radius` and `radius_of_one`; else null",
        "left_out": 'how many could not be read, with on_bad = "skip"',
        "left_out_first": "why the first of them could not",
    },
    COPIES: {
        "out": "the file that was written",
        "documents": "how many were compared",
        "equal": "how many seem equal to an earlier one",
        "near": "how many share at least 0.8 with one",
        "left_out": 'how many could not be read, with on_bad = "skip"',
        "left_out_first": "why the first of them could not",
    },
    INSPECT: {
        "source": "as it was named",
        "what": "in words",
        "tokenizer": "its name",
        "vocab": "its ids",
        "seq_len": "tokens of a sample",
        "fingerprint": "of the content",
        "splits": "documents, tokens, lengths and duplicates of each part",
        "samples": "some texts; of a table its first rows as the model sees them",
        "told": "what was seen in a table, the tokenizer's special tokens, and files that are not read",
        "card": "of prepared data, where they are from; of a table its columns and `labels`",
    },
    INSPECT_IMAGES: {
        "source": "as it was named",
        "what": "in words",
        "image_size": "the side of the squares that are trained on",
        "fingerprint": "of the images for training",
        "splits": "of each part the number of its images, and by class; of those `looked_at` how many are `damaged`,"
        " the share of `duplicates`, `shorter_sides` in pixels, `mean` and `deviation` of the colours",
        "samples": "some images with their classes",
        "told": "images that cannot be decoded, classes that a part lacks, and files that are not read",
    },
    DOCTOR: {"findings": "`what`, how it `is`, and what to do about it"},
    BENCH: {
        "steps": "of each kind",
        "reading_seconds": "median of steps that read",
        "repeated_seconds": "median of steps that trained on batches read before",
        "data_seconds": "waiting for the batch",
        "plan": "in one line",
        "bound": "what bounds the steps that read",
    },
    PROBE: {"...": "the measured figures, as they are kept: the journal's `cluster` has them in use"},
    FORGET: {"machine": "this one", "runs": "finished runs forgotten", "tasks": "measured tasks forgotten"},
}


def undeclared(shape: str, keys: set[str]) -> set[str]:
    """Return the keys of an object that its shape does not declare, and those that it declares and lacks."""
    declared = SHAPES[shape]
    known = {key.rstrip("?") for key in declared} | set(ALWAYS)
    wanted = {key for key in declared if not key.endswith("?") and key != "..."}
    extra = set() if "..." in declared else keys - known
    return extra | (wanted - keys)
