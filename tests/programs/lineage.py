"""A chain of processes: each argument is a step, and the last process prints as JSON what it takes itself for.

Steps: "fork", "spawn" and "exec" (by `subprocess`) go on in a child; "RANK=1,WORLD_SIZE=2" sets variables; "call"
calls a decorated function, as a rank that has no run.
"""

import json
import multiprocessing
import os
import subprocess
import sys

from flyteplugins_tracking import get_distributed_info, tracking_init
from flyteplugins_tracking._rank.topology import examine


@tracking_init(project="tests")
def called() -> None:
    pass


def go_on(steps: list[str]) -> None:
    if not steps:
        found, seen = examine(os.environ), get_distributed_info()
        ranks = {"rank": found.info, "parent": found.parent, "seen": seen}
        print(json.dumps({name: info and info.rank for name, info in ranks.items()}))
        return
    step, rest = steps[0], steps[1:]
    if "=" in step:
        os.environ.update(pair.split("=") for pair in step.split(","))
        go_on(rest)
    elif step == "call":
        called()
        go_on(rest)
    elif step == "exec":
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, *rest], check=True)
    else:
        child = multiprocessing.get_context(step).Process(target=go_on, args=(rest,))
        child.start()
        child.join()
        assert child.exitcode == 0


if __name__ == "__main__":
    go_on(sys.argv[1:])
