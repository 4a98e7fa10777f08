"""A rank that calls a decorated function in processes of its own, while its own run is open or without one.

Arguments: how the processes are started ("fork" or "spawn"), and whether the rank has a run ("tracked" or "plain").
"""

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="tests")
def trial(number: int) -> None:
    run = get_run()
    if run is not None:
        for row in range(20):
            run.log({"trial": number, "row": row})
        time.sleep(1)


def search() -> None:
    run = get_run()
    if run is not None:
        run.log({"search": 1})
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
        list(pool.map(trial, range(2)))


if __name__ == "__main__":
    (tracking_init(project="tests")(search) if sys.argv[2] == "tracked" else search)()
