"""Tariffs and carbon of electricity in time, and the hours in which a run trains by them."""
