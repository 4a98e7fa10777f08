"""The roll-call of a job that hangs: real ranks, of which one sleeps, holds the GIL in C or is stopped."""

from __future__ import annotations

import re

import pytest
from support import jobs

PROGRAM = str(jobs.PROGRAMS / "hanging_ranks.py")
TIMEOUT_S = 2.5
HANG_S = 3.5 * TIMEOUT_S


@pytest.mark.parametrize(
    ("how", "rank_1"),
    [
        pytest.param("sleeps", r"at hanging_ranks.py:\d+ next_batch", marks=pytest.mark.wide),
        ("holds the GIL", "does not answer"),
        pytest.param("is stopped", "does not answer", marks=pytest.mark.wide),
    ],
)
def test_the_run_and_the_log_say_once_where_the_ranks_are(tmp_path, how, rank_1):
    """And nothing of an evaluation before, which calls `heartbeat`."""
    torchrun = jobs.torchrun("--standalone", "--nproc-per-node=3", "--monitor-interval=0.1")
    done = jobs.run([*torchrun, PROGRAM, how, str(TIMEOUT_S), str(HANG_S)], tmp_path)
    assert done.returncode == 0, done.output
    (run,) = done.runs
    verdict = run.summary["hang/verdict"]
    assert done.output.count("no progress for") == 1, done.output
    assert verdict in done.output
    pattern = rf"no progress for {TIMEOUT_S:g} s: ranks 0, 2 at hanging_ranks.py:\d+ all_reduce; rank 1 {rank_1}"
    assert re.fullmatch(pattern, verdict), verdict
    text = next(tmp_path.rglob("hang.txt")).read_text()
    assert text.startswith(verdict)
    assert [line.partition(" at ")[0] for line in text.splitlines()[1:]][::2] == ["rank 0", "rank 2"]
    if how != "is stopped":  # each rank's stacks are in its own log
        assert re.search(
            r'File ".*hanging_ranks.py", line \d+ in ' + ("next_batch" if how == "sleeps" else "holds_the"), done.output
        )
    assert run.exit_code == 0
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
