"""Preparing data ahead of training: text to token shards, and a look at what is there."""
