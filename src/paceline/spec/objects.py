"""What Python may put in the place of a name: attributes that such an object has, and what it is in words."""

CALLED = {"__call__": "a function"}
MODELS = {"__call__": "a torch.nn.Module or a function that makes one"}
DATA_SETS = {"__len__ __getitem__": "a data set with a length, or (train, validation)", "read samples": "a Source",
             "open_sources": "what opens sources"}  # fmt: skip
METRICS = {"__call__": "a function (outputs, batch)", "update compute reset": "a metric of torchmetrics"}
