"""How samples become rows of a batch: windows of a text, and where packed documents begin."""
