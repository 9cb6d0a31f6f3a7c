"""The data of a task: documents, tokens, the order of samples, and the sources that give batches."""
