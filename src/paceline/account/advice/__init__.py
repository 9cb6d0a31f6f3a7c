"""What would make a run cheaper: advice from the journal, the money that advice would save, and how sure that is."""
