import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from model import Net, Rows
from torch.utils.data import DataLoader

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=16, shuffle=True))
step, losses = 0, []
while step < 150:
    for tokens, labels in loader:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step == 150:
            break
print("metric", sum(losses[-20:]) / 20)
