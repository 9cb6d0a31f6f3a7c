"""A run as its journal has it now: folded record by record, so that a look at a long run costs what is new."""
