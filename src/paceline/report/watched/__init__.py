"""What was seen of a run besides its steps: the nodes, and the health of training."""
