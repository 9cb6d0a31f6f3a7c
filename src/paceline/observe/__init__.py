"""While a run goes on, and after the run: what the journal shows of how training goes."""
