"""What submitit's process does with a pickled job, as far as a run meets it: its signals, its requeue, its results.

    python -u submitted.py DIRECTORY

In the directory is `submitted.pkl`. SIGUSR2 comes before the time limit: rank 0 replaces the pickle by what
`checkpoint()` returns, asks for a requeue and exits; the other ranks go on until Slurm ends them. SIGTERM and SIGCONT
do nothing.
"""

import os
import pickle
import signal
import sys
import traceback
from pathlib import Path

directory, rank = Path(sys.argv[1]), int(os.environ["SLURM_PROCID"])
job = pickle.loads((directory / "submitted.pkl").read_bytes())


def bypass(number, frame):
    print(f"Bypassing signal {signal.Signals(number).name}", file=sys.stderr)


def checkpoint_and_try_requeue(number, frame):
    if rank == 0:
        (directory / "submitted.pkl").write_bytes(pickle.dumps(job.checkpoint()))
        (directory / "requeue").touch()  # scontrol requeue
        sys.exit(-1)


signal.signal(signal.SIGUSR2, checkpoint_and_try_requeue)
signal.signal(signal.SIGTERM, bypass)
signal.signal(signal.SIGCONT, bypass)
try:
    result = ("success", job())
except Exception:
    result = ("error", traceback.format_exc())
(directory / f"{rank}_result.pkl").write_bytes(pickle.dumps(result))
sys.exit(int(result[0] == "error"))
