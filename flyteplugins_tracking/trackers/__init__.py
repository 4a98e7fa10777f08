"""Trackers: one module each, found by name in `base` and imported when it is used."""
