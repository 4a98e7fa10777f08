"""The life of a run around one call of a decorated function."""
