"""Flyte 2's `Elastic` without its watchdog, which can end a pod whose training has ended well.

Every 10 s it counts the workers that have ended and that the agent has not reaped. If these are all of them, it takes
the agent for one that hangs, and ends the pod with 1. Ranks that have just returned are such workers for some
milliseconds: on a busy machine, 2 of 320 pods ended so.
"""

import threading

from flyteplugins.pytorch import Elastic as Elastic
from flyteplugins.pytorch import task


def start_no_watchdog(nproc: int) -> threading.Event:
    return threading.Event()


task._start_zombie_watchdog = start_no_watchdog
