from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

classes = sorted(path.name for path in Path("images/train").iterdir())


class Pictures:
    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*/*.png"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
        return {"pixel_values": pixels / 127.5 - 1, "labels": classes.index(path.parent.name)}


def accuracy(found):
    return {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}


arguments = TrainingArguments(
    "out", max_steps=200, per_device_train_batch_size=16, learning_rate=1e-3, lr_scheduler_type="constant",
    use_cpu=True, report_to=[],
)  # fmt: skip
model = AutoModelForImageClassification.from_pretrained("convnext")
trainer = Trainer(
    model, arguments, train_dataset=Pictures("images/train"), eval_dataset=Pictures("images/held_out"),
    compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
print("metric", trainer.evaluate()["eval_accuracy"])
