"""A run's journal for other tools: read beside the run, delivered in order, and later where a tool was away."""
