"""What bounds a run's steps, as the report says it."""
