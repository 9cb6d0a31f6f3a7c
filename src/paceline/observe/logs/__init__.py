"""What ranks have printed, read back: one rank's log, all by their moments, and what is added while a run goes on."""
