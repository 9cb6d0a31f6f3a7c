import torch.nn.functional as F
from model import Net, Rows

import paceline


def objective(model, batch):
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.numel()


task = paceline.Task(
    model=Net(), data=Rows(), objective=objective, optimizer={"lr": 2e-3}, schedule={"kind": "constant"},
    global_batch="16 samples", stop="150 steps",
)  # fmt: skip
losses = []
run = paceline.Run(task)
for batch in run:
    losses.append(run.step(batch).loss)
print("metric", sum(losses[-20:]) / 20)
