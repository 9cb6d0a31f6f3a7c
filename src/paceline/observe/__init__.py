"""While a run goes on, and after it: what its journal shows of how it goes."""
