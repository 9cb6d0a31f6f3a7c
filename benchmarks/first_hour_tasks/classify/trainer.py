import csv

import numpy as np
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer, TrainingArguments

tokenizer = PreTrainedTokenizerFast(tokenizer_file="head/tokenizer.json", pad_token="<|end_of_text|>")
tables = {name: list(csv.DictReader(open(f"table/{name}.csv", newline=""))) for name in ("train", "validation")}
classes = sorted({row["label"] for row in tables["train"]})


def rows(name):
    encoded = tokenizer([row["text"] for row in tables[name]], truncation=True, max_length=64)
    labels = [classes.index(row["label"]) for row in tables[name]]
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(encoded["input_ids"], encoded["attention_mask"], labels)
    ]


def accuracy(found):
    return {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}


arguments = TrainingArguments(
    "out", max_steps=150, per_device_train_batch_size=16, learning_rate=1e-3, lr_scheduler_type="constant",
    use_cpu=True, report_to=[],
)  # fmt: skip
model = AutoModelForSequenceClassification.from_pretrained("head")
trainer = Trainer(
    model, arguments, train_dataset=rows("train"), eval_dataset=rows("validation"), processing_class=tokenizer,
    compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
print("metric", trainer.evaluate()["eval_accuracy"])
