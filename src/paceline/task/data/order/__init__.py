"""Which sample stands at which position of a training: pure functions of seed and position."""
