"""Adapters: other libraries in the place of what gradus does itself. None of them is needed."""
