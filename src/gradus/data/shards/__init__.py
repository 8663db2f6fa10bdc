"""Shards: a dataset as tar files with an index beside them, so that any sample is one read away."""
