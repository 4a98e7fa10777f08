"""As many roles as the argument says, each in a thread: they log 10 rows each. The file `joined` says that all have."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from flyteplugins_tracking import get_run, tracking_init

failed: list[BaseException] = []


def roll_out(number: int) -> None:
    @tracking_init(
        tracker="trackio",
        project="rl",
        id="grpo-42",
        role=f"rollout-{number}",
        config={"number": number},
        init_timeout_s=120,
    )
    def work() -> None:
        for value in range(10):
            get_run().log({"rank0": value})

    try:
        work()
    except BaseException as error:
        failed.append(error)


threads = [threading.Thread(target=roll_out, args=(number,)) for number in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
Path("joined").touch()
if failed:
    raise failed[0]
