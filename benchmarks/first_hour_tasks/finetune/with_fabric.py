import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_file="base/tokenizer.json")


def rows(name):
    tokens = tokenizer(open(name).read())["input_ids"]
    return torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128)


fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = AutoModelForCausalLM.from_pretrained("base")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
train = fabric.setup_dataloaders(DataLoader(rows("corpus.txt"), batch_size=8, shuffle=True))
test = fabric.setup_dataloaders(DataLoader(rows("held_out.txt"), batch_size=8))
model.train()
step = 0
while step < 80:
    for batch in train:
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 80:
            break
model.eval()
with torch.no_grad():
    losses = [model(input_ids=batch, labels=batch).loss for batch in test]
fabric.print("metric", float(fabric.all_reduce(torch.stack(losses).mean())))
