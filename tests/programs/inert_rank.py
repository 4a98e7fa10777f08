"""What a rank without a run holds before, inside and after its function. Arguments: the package's parent, the tracker.

It prints: whether there is no run; the file descriptors, threads and children at the three times; the loaded modules.
It is run isolated and without `site`, and imports as little as it can.
"""

import os
import sys
import threading

sys.path.insert(0, sys.argv[1])

from flyteplugins_tracking import get_run, tracking_init

Footprint = tuple[list[str], list[str], str]


def footprint() -> Footprint:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read()
    return sorted(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()], children


@tracking_init(tracker=sys.argv[2], project="p", id="never", config={"lr": 1e-3, "sizes": [1, 2]})
def train() -> tuple[object, Footprint]:
    return get_run(), footprint()


before = footprint()
run, inside = train()
print([run is None, [before, inside, footprint()], sorted(sys.modules)])
