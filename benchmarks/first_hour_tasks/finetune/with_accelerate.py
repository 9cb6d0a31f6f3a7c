import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_file="base/tokenizer.json")


def rows(name):
    tokens = tokenizer(open(name).read())["input_ids"]
    return torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128)


accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained("base")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train = DataLoader(rows("corpus.txt"), batch_size=8, shuffle=True)
test = DataLoader(rows("held_out.txt"), batch_size=8)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
model.train()
step = 0
while step < 80:
    for batch in train:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 80:
            break
model.eval()
with torch.no_grad():
    losses = [accelerator.gather(model(input_ids=batch, labels=batch).loss).mean() for batch in test]
accelerator.print("metric", float(torch.stack(losses).mean()))
