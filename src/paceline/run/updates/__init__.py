"""How weights are updated where one optimizer over a model's own tensors is not enough."""
