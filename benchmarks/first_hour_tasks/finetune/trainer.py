import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

tokenizer = PreTrainedTokenizerFast(tokenizer_file="base/tokenizer.json")


def rows(name):
    tokens = tokenizer(open(name).read())["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128)
    return [{"input_ids": row, "labels": row} for row in rows]


arguments = TrainingArguments(
    "out", max_steps=80, per_device_train_batch_size=8, learning_rate=1e-3, lr_scheduler_type="constant",
    use_cpu=True, report_to=[],
)  # fmt: skip
model = AutoModelForCausalLM.from_pretrained("base")
trainer = Trainer(model, arguments, train_dataset=rows("corpus.txt"), eval_dataset=rows("held_out.txt"))
trainer.train()
print("metric", trainer.evaluate()["eval_loss"])
