"""What `benchmarks/forecast_grid.py` needs: a rank that runs many plans in turns, a user's module, and the scores."""
