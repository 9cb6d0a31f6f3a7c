"""`paceline dash`: runs as they go on, on a page."""
