"""Hyperparameter sweeps.

In the room: how a sweep is created for a function, and what its trials know (`sweep`).
May enter: what W&B sweeps need beyond a run. Must not: what a run needs without a sweep.
It may import every room but `_commands`, `compat` and `testing`.
"""
