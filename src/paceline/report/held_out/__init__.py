"""Metrics of held-out samples, as the report shows them."""
