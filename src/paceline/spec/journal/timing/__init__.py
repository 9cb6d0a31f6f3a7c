"""When a run held its devices, by one clock whatever became of the machine's."""
