"""What looks on while a run goes: alerts, and what the verb `alerts` does."""
