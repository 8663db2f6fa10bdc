"""Reference models: each in its own file, listed in `catalogue`."""
