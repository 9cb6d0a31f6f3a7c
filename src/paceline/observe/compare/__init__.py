"""Runs beside each other: curves, speed, memory, money, what differs between them, and how sure a difference is."""
