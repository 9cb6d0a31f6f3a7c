"""What is measured of a task beside its steps."""
