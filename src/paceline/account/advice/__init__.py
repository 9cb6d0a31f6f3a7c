"""What would make a run cheaper: advice from its journal, each with what it would save and how sure that is."""
