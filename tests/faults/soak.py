"""`make soak`: 200 restarts of a 4-rank job that fails. No row is lost, none is twice, and nothing leaks."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support.harness import ends, job, torchrun

RESTARTS, RANKS = 200, 4


def main(restarts: int = RESTARTS) -> int:
    """Restart a job so often whose rank 0 raises."""
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
    failures = [text for text, is_wrong in wrong.items() if is_wrong]
    print(failures or "all well")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
