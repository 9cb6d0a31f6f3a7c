"""Conversations of a table: read as messages, written by a template, with marks of what the assistant says."""
