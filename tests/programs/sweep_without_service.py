"""Prints the error of a sweep that cannot be made. Argument `without-wandb`: as if W&B was not installed."""

import importlib.util
import sys

if "without-wandb" in sys.argv:
    importlib.util.find_spec = lambda name, package=None: None

from flyteplugins_tracking import TrackingError, tracking_config, tracking_sweep


@tracking_sweep(method="grid", parameters={"x": {"values": [1]}}, project="p", entity="e")
def search() -> None:
    raise SystemExit("the function was called")


try:
    with tracking_config(init_timeout_s=2):
        search()
except TrackingError as error:
    print(type(error).__name__, error)
