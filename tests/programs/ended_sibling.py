"""Starts 3 ranks and reaps none. Rank 0 looks for the others, and prints which have failed. The argument:

ended: rank 1 has ended before rank 0 looks.
late: when rank 0 looks, a helper has ended, and rank 2 is not there yet. Then rank 1 is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job.siblings import Siblings
from flyteplugins_tracking._job.watch import WATCH

CASE = sys.argv[1]
SLEEP, END = "import time; time.sleep(60)", "import os; os._exit({})"


def start(rank: int | None, code: str) -> subprocess.Popen[bytes]:
    env = os.environ if rank is None else {**os.environ, "RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-c", code], env=env)


def start_ranks() -> None:
    env = {**os.environ, "RANK": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    primary = subprocess.Popen([sys.executable, __file__, CASE], env=env, text=True, **pipes)
    assert primary.stdin is not None
    assert primary.stdout is not None
    failing = start(1, END.format(7) if CASE == "ended" else SLEEP)
    ended = failing if CASE == "ended" else start(None, END.format(9))
    last = start(2, SLEEP) if CASE == "ended" else None
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    primary.stdin.write("look\n")
    primary.stdin.flush()
    primary.stdout.readline()
    last = last or start(2, SLEEP)
    if CASE == "late":
        failing.kill()  # it would reap a process that has ended
    print(primary.communicate("tell\n")[0], end="")
    last.kill()


def look() -> None:
    input()
    info = DistributedInfo(0, 3, 0, 3, 0, 1, launcher="torchelastic")
    siblings = Siblings(info)
    WATCH.add(info, siblings, without="nobody is watched")
    print("looked", flush=True)
    input()
    until = time.monotonic() + 20
    while not any(failure.rank == 1 for failure in siblings.failures(None)) and time.monotonic() < until:
        time.sleep(0.01)
    print([(failure.rank, failure.exit_code) for failure in siblings.failures(None)])


if "RANK" in os.environ:
    look()
else:
    start_ranks()
