"""The public names of other plugins, implemented with this library: one module for each tracker.

In the room: the names for W&B (`wandb`).
May enter: names that another plugin has. Must not: new features, which are for `tracking_init`.
It may import every room but `_commands` and `testing`.
"""
