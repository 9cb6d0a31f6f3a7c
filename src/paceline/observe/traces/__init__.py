"""What a trace tells: where time went, what was hidden, which gaps the host caused."""
