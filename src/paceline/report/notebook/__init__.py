"""What a notebook shows of a run."""
