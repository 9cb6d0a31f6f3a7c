"""Callbacks of the user: where a callback is called, what it may decide, and that ranks agree on the decision."""
