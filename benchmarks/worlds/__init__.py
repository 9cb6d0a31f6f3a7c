"""Worlds that this machine does not have: thousands of ranks without processes, and a slow network."""
