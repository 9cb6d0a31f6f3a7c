"""What was seen of a run besides its steps: its nodes, and the health of its training."""
