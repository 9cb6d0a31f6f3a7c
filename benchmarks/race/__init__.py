"""Loops that do the same work and take turns of a few steps: the loops, the turns, and what they show."""
