"""What a new head of transformers is called, and what of a folder's files belongs to the head before. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatchcase

OF_TOKENS = ("ForCausalLM", "LMHeadModel")  # how transformers' classes that predict the next token end
PLAIN = ("classifier.*",)
CAUSAL = ("score.*",)  # of classes whose body says the next token
# By `model_type` of config.json, where heads for whole texts or images are called otherwise (transformers 5).
NAMED: dict[str, tuple[str, ...]] = {
    "distilbert": ("pre_classifier.*", *PLAIN),
    "deberta": ("pooler.*", *PLAIN),
    "deberta-v2": ("pooler.*", *PLAIN),
    "xlnet": ("sequence_summary.*", "logits_proj.*"),
    "modernbert": ("head.*", *PLAIN),
}
TEACHER = ("cls_classifier.*", "distillation_classifier.*")  # of DeiT with a teacher
HEADS = frozenset(pattern for each in (PLAIN, CAUSAL, TEACHER, *NAMED.values()) for pattern in each)
# Bodies whose head for whole texts reads a pooler, which folders that were made for masked tokens may lack.
POOLED = ("bert", "albert", "mobilebert", "nystromformer", "big_bird", "ernie", "megatron-bert")


def new_head(model_type: str, architecture: str, stored: Collection[str], *, is_other_class: bool) -> tuple[str, ...]:
    """Return the patterns of what is not read: parameters of the new head, and what of `stored` the head before had.

    `architecture` is the class with the new head. Where it `is_other_class` than the folder's, what the files have of
    its head but for the last layer is read, as `from_pretrained` does.
    """
    patterns = TEACHER if architecture.endswith("WithTeacher") else NAMED.get(model_type, PLAIN)
    if is_other_class:
        known = {each for each in patterns if any(fnmatchcase(name, each) for name in stored)}
        patterns = tuple(each for each in patterns if each in PLAIN or each not in known)
    if not stored or not is_other_class:
        return patterns
    ((body, _),) = Counter(name.partition(".")[0] for name in stored).most_common(1)
    heads = {pattern.partition(".")[0] for pattern in NAMED.get(model_type, PLAIN)}
    old = sorted({name.partition(".")[0] for name in stored} - heads - {body})
    pooler = f"{body}.pooler."
    needs = [f"{pooler}*"] if model_type in POOLED and not any(name.startswith(pooler) for name in stored) else []
    return (*patterns, *needs, *(f"{first}.*" for first in old))
