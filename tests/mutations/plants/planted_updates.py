"""Mistakes of bf16 and fp16 that a first update has no sign of: the second one, a skip or an evaluation shows them."""

from __future__ import annotations

from planted_lines import both, line
from planted_low import OTHER, low

CAST, STEPPER = "run.numerics.precision:cast_unit", "run.loop.step:Stepper._make"
SHARDS = "run.parallel.data.sharding:ShardedGradients"
STALE, UNCAST = "stale casts", "casts of evaluations"
DOWN = ("down = (self.scaler.scale if", "down = (vars(self).setdefault('_scale', self.scaler.scale) if")
ONCE = (
    ("forward = unit.forward\n", "forward, kept = unit.forward, {}\n"),
    ("casts: dict[int, torch.Tensor] = {}", "casts = kept if torch.is_grad_enabled() else {}"),
)
CASTS = "        args, kwargs = _inputs_of_unit((args, kwargs), dtype)\n        originals"
UNLESS = "        if not torch.is_grad_enabled():\n            return forward(*args, **kwargs)\n"
IN_FP32 = (CASTS, UNLESS + CASTS)
MASTERS = "next(self._model.parameters()).dtype == torch.float64"

UPDATES_PROOFS = [
    low(STALE, "bf16: copies keep the casts of their first weights", "copies, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: stages keep the casts of their first weights", "stages, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: tensor ranks keep the casts of their first weights", "tensor, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: gathered weights are not gathered again after an update", "zero 2, bf16",
        both(line(f"{SHARDS}.zero", ("unit.reshard()", f"unit.reshard() if {MASTERS} else None")),
             line(f"{SHARDS}.before_micro_batch",
                  ("reshard_after_backward=last", f"reshard_after_backward=last and {MASTERS}"))),
        "dtype", "the weight of"),
    low("loss scale", "fp16: after a skip losses keep the scale from before", "copies, fp16", line(STEPPER, DOWN),
        "gradients", "", OTHER, 4),
    low("loss scale", "fp16: shards keep the scale from before a skip", "zero 3, fp16", line(STEPPER, DOWN),
        "gradients", "", OTHER, 4),
    low(UNCAST, "bf16: copies evaluate in fp32", "copies, bf16", line(CAST, IN_FP32), "evaluation", "", OTHER, 2),
]  # fmt: skip
