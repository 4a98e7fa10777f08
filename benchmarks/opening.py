"""Opening a W&B run that an earlier attempt has left behind, against a new run: a file of 100 MB, and rows not sent.

make bench ROWS=opening
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAIRS = 3
BEHIND, NEW = KINDS = ("behind 100 MB", "a new run")
RUN_ID, OTHER_ID = "bench", "another"
# Rows that were sent, each of so many bytes; and rows that were not.
SENT, BYTES, UNSENT = 1_000, 100_000, 1_500
# Rows that are older are in the file for certain, and not looked for in the journal.
OLD_S = 31.0
LIMIT_MS = 1_000.0


# In a rank. The rest of the benchmarks is not there.


def killed() -> None:
    """Log until the file is large and all is sent, log some more, and die."""
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench", id=RUN_ID)
    def train() -> None:
        run = get_run()
        for _ in range(SENT):
            run.log({"text": random.randbytes(BYTES // 2).hex()})
        time.sleep(OLD_S)  # W&B has them: the client sends every 3 s here
        for n in range(UNSENT):
            run.log({"n": n})
        os.kill(os.getpid(), signal.SIGKILL)

    train()


def rank(run_id: str) -> None:
    import wandb  # noqa: F401

    from flyteplugins_tracking import tracking_init

    @tracking_init(project="bench", id=run_id)
    def train() -> float:
        return time.perf_counter()

    began = time.perf_counter()
    Path("figures.json").write_text(json.dumps({"open_ms": (train() - began) * 1e3}))


# In the one who measures


def main() -> None:
    import peers
    from child import alone, measured
    from paired import Figures, Goal, Quantity, Result, difference, in_turn, publish, table
    from support.wandb_server import WandbServer

    python = peers.python("wandb")

    def measure(kind: str) -> Figures:
        with WandbServer() as server, tempfile.TemporaryDirectory() as disk:
            variables = {**server.environment, "WANDB_DIR": disk, "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "3"}
            if kind == BEHIND:
                subprocess.run([python, __file__, "killed"], cwd=disk, env=alone(Path(disk), variables), timeout=300)
                assert len(server.runs[0].rows) == SENT, "the rows that were not to be sent were"
            run_id = RUN_ID if kind == BEHIND else OTHER_ID
            figures = measured(python, __file__, "rank", run_id, variables=variables)
            assert len(server.runs[0].rows) == (SENT + UNSENT if kind == BEHIND else 0)
            return figures

    found = in_turn(KINDS, measure, PAIRS)
    more_ms = difference(found, "open_ms", BEHIND, NEW)
    goal = Goal(
        f"opening a W&B run with a file of 100 MB and {UNSENT:,} unsent rows behind it, over a new run",
        f"{LIMIT_MS:.0f} ms",
        f"{more_ms:.0f} ms",
        more_ms <= LIMIT_MS,
    )
    quantities = [Quantity("open_ms", "from the call to the function, ms", "{:.0f}")]
    publish("opening", Result(f"{PAIRS} pairs.\n\n{table('opening', quantities, found)}", [goal], found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["killed"]:
        killed()
    elif sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2])
    else:
        main()
