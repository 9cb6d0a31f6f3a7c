"""Callbacks of the user: where they are called, what they may decide, and that ranks agree on it."""
