"""`make soak`: 200 restarts of a 4-rank job that fails, and 50 of a job that is killed.

No row is lost, none is twice, nothing leaks, and opening the run takes no longer each time.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from support import jobs
from support.harness import Job, ends, job, python, torchrun

RESTARTS, KILLS = 200, 50
RANKS = 4
# An attempt is killed within so many seconds of its first rows.
LONGEST_S = 2.0
# How much longer the last openings may take than the first ones, in seconds: the medians of so many.
SLOWER_S, OPENINGS = 1.0, 5


def main(restarts: int = RESTARTS, kills: int = KILLS) -> int:
    failures = [*(restarted(restarts) if restarts else []), *(killed(kills) if kills else [])]
    print(failures or "all well")
    return int(bool(failures))


def restarted(restarts: int) -> list[str]:
    """Restart a job so often whose rank 0 raises, and return what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        temporary = Path(directory, "tmp")
        temporary.mkdir()
        started_at = time.monotonic()
        with job(Path(directory)) as started:
            command = torchrun(f"--max-restarts={restarts}", f"--log-dir={directory}/agent", ranks=RANKS)
            started.start(command, {"TMPDIR": str(temporary)}, **ends({"0": "raise"}, attempts=restarts, rows=5))
            found = started.outcome(timeout_s=60 * 15)
        left = [path.name for path in temporary.iterdir()]
    held = {tuple(line.split()[1:]) for lines in found.notes.values() for line in lines if line.startswith("held 0 ")}
    wrong = {
        f"the job ended with {found.returncode}": found.returncode != 0,
        f"{found.lost} rows lost": found.lost > 0,
        f"{found.duplicates} rows twice": found.duplicates > 0,
        "steps missing": sorted(found.steps) != list(range((restarts + 1) * 5)),
        f"exit codes {found.exit_codes}": found.exit_codes != (*[1] * restarts, 0),
        f"{found.runs} runs": found.runs != 1,
        f"still running: {found.leaked}": found.leaked != (),
        f"temporary files left: {left}": bool(left),
        f"rank 0's file descriptors and threads differ between attempts: {sorted(held)}": len(held) != 1,
    }
    seconds = time.monotonic() - started_at
    print(f"{restarts} restarts of {RANKS} ranks in {seconds:.0f} s: {len(found.arrived)} rows")
    return [text for text, is_wrong in wrong.items() if is_wrong]


def killed(kills: int) -> list[str]:
    """Kill a job so often, each time on the same disk, and return what is wrong."""
    settings = {"tracking": {"id": jobs.RUN_ID}}
    moments = random.Random(18)
    with tempfile.TemporaryDirectory() as directory, job(Path(directory)) as started:
        opened_s: list[float] = []
        for number in range(1, kills + 1):
            process = started.start(python(), **ends("loop", attempts=99, **settings))
            opened_s.append(_opening_s(started, number))
            started.wait_for("ready 0 0", number)
            time.sleep(moments.random() * LONGEST_S)
            started.signal(process.pid, signal.SIGKILL)
            process.communicate()
        started.start(python(), **ends("return", **settings))
        opened_s.append(_opening_s(started, kills + 1))
        found = started.outcome()
        left = list(Path(directory).rglob("*.journal.*"))
    first, last = statistics.median(opened_s[1 : 1 + OPENINGS]), statistics.median(opened_s[-OPENINGS:])
    wrong = {
        f"{found.lost} rows lost": found.lost > 0,
        f"{found.duplicates} rows twice": found.duplicates > 0,
        "steps missing": sorted(found.steps) != list(range(len(found.arrived))),
        f"the run is {found.state}": found.state != "finished",
        f"journals left: {left}": bool(left),
        f"opening takes {last:.2f} s after {first:.2f} s": last > first + SLOWER_S,
    }
    print(
        f"{kills} kills: {len(found.arrived)} rows; opening takes {opened_s[0]:.2f} s, then {first:.2f} s, at last "
        f"{last:.2f} s, at most {max(opened_s):.2f} s"
    )
    return [text for text, is_wrong in wrong.items() if is_wrong]


def _opening_s(started: Job, number: int) -> float:
    """Return how long the attempt of this number takes from its start to its function's."""
    started.wait_for("starts 0", number)
    began = time.monotonic()
    started.wait_for("entered 0", number)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
