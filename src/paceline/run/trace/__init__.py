"""Traces of a running job: which steps, on which ranks, and in whose words."""
