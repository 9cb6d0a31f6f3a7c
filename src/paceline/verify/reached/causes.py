"""Causes of a whole batch that differs from cut ones: families of mistakes, and each in a sentence.

A sentence has places for what was seen (`shown`) and for names.
"""

from __future__ import annotations

from paceline.verify.compare.diagnosis import Diagnosis

NO_SUM = Diagnosis(
    "loss not a sum over rows",
    "this loss is not a sum over rows: {shown}. An objective returns the sum of its rows' losses and how many items"
    ' they count. One whose rows see each other says so by an attribute coupled = "batch", on the objective or the'
    " model, and runs on whole batches: data axes and accumulation are closed, unless it takes `gather_rows`",
)
MOVES = Diagnosis(
    "buffers that move with each call",
    "this loss follows how often the model is called: {shown}. It does not where these buffers stand still between the"
    " pieces, which every call moves: {names}. A step calls the model once for every micro-batch. A layer that moves"
    " nothing in evaluation mode, as torch's spectral_norm, may stay in it (module.eval()); or a callback moves the"
    " buffer, once a step",
)
LEFT_BEHIND = Diagnosis(
    "what calls leave behind",
    "this loss follows what earlier calls have left on the model or the objective: {shown}. A program that was called"
    " before and one that is made for each cut differ in that. Calls change: {names}. Every micro-batch, rank and start"
    " would go on from what its own calls have left. What is kept between calls follows from the weights alone, or is a"
    " buffer that is alike on all ranks",
)
TAKES_GRADIENTS = Diagnosis(
    "gradients taken by the objective",
    "the objective changes gradients itself, before it returns its loss: {shown}. backward() of another loss adds what"
    " no step divides by its items, and zero_grad() drops what micro-batches before it have given. An objective returns"
    " one sum of all its terms; the step goes backward, and clears gradients, once for all",
)
FOR_OTHERS = Diagnosis(
    "random numbers of other samples",
    "this loss is a sum over rows where all samples draw the same numbers, and none where each draws its own: {shown}."
    " Row i of a batch is not the sample that the program was asked for as its i-th, so that a sample's random numbers"
    " follow the cut: a collate that sorts rows or leaves some out, or rows that a model puts in another order. Keep"
    " rows in their order; what is broken counts nothing by its label, -100",
)
OUT_OF_PROPORTION = Diagnosis(
    "gradient not in proportion",
    "the gradient is not in proportion to the loss: {shown}. A hook or the backward pass of a Function clips it on its"
    " way back, or normalises it, and a step scales the loss by numbers of its own: what is kept of a gradient would"
    " follow these. task.optimizer.clip_norm clips the gradient of the whole batch; on a gradient's way factors alone"
    " are right",
)
KEEPS_DRAWS = Diagnosis(
    "rows that keep what they drew",
    "sample {shown} draws random numbers when it is read first, and none when it is read again: the data set holds it"
    " as it was augmented. Another rank, or a start after a resume, reads it first at another position, and has another"
    " one. Hold the sample as it is before it is augmented",
)
