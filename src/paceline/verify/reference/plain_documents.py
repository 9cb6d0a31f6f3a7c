"""Where tokens of packed documents stand and what they see, written plainly for references.

A batch may say both itself (task/objective.py); references say both token by token, from the numbers of the documents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.task.data.rows.packed import STARTS
from paceline.task.objective import Objective, next_token


def placed_plainly(objective: Objective, data: object) -> object:
    """Return the data with "positions" and "mask" in the place of packed "documents", for the built-in objective.

    Positions, int64 [rows, seq], count from where a document begins; the mask, bool [rows, 1, seq, seq], has the keys
    of a query's document up to the query. Another objective may read documents as it likes: its data stay.
    """
    if objective is not next_token or not isinstance(data, Mapping) or "documents" not in data:
        return data
    documents = data["documents"].tolist()
    positions = torch.zeros_like(data["documents"], dtype=torch.int64)
    mask = torch.zeros(len(documents), 1, *2 * positions.shape[1:], dtype=torch.bool)
    for row, numbers in enumerate(documents):
        begin = 0
        for at, number in enumerate(numbers):
            begin = at if at and number != numbers[at - 1] else begin
            positions[row, at] = at - begin
        for number in set(numbers):
            own = torch.tensor([at for at, other in enumerate(numbers) if other == number])
            mask[row, 0, own.unsqueeze(1), own] = own.unsqueeze(1) >= own
    rest = {name: value for name, value in data.items() if name not in ("documents", STARTS)}
    return {**rest, "positions": positions, "mask": mask}
