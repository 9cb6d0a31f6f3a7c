"""Pictures that only a run that goes on has."""
