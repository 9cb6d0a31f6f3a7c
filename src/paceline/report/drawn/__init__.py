"""Figures that a finished run's page and the live page share."""
