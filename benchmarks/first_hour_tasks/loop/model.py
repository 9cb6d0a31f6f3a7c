"""The model and the data of a loop of one's own; they are the same for all, and not counted."""

import torch
from torch import nn


class Net(nn.Module):
    """An LSTM over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(256, 256)
        self.layers = nn.LSTM(64, 256, batch_first=True)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens))[0])


class Rows:
    """Rows of 65 characters: 64 to read, and each one's next."""

    def __init__(self) -> None:
        text = torch.tensor(list(open("text.txt", "rb").read()))
        self.rows = text[: len(text) // 65 * 65].view(-1, 65)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index][:-1], self.rows[index][1:]
