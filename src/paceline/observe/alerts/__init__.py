"""What wakes somebody: rules over a run's journal, and where what they find is sent. No torch."""
