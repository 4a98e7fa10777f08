"""What a rank without a run holds before, inside and after its function.

Arguments: the search path, the tracker, and modules that the training has imported before, as torch.
It prints: whether there is no run; the file descriptors, threads and children at the three times; the modules that were
loaded since.
It is run isolated and without `site`, and imports as little as it can.
"""

import importlib
import os
import sys
import threading

sys.path[:0] = sys.argv[1].split(os.pathsep)
for module in sys.argv[3:]:
    importlib.import_module(module)
loaded = set(sys.modules)

from flyteplugins_tracking import get_run, tracking_init  # noqa: E402 the search path comes first

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
print([run is None, [before, inside, footprint()], sorted(set(sys.modules) - loaded)])
