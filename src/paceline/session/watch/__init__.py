"""What looks on while a run goes: alerts."""
