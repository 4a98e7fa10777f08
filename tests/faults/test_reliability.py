"""The fault matrix, each fault as a real job against the recording server."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import jobs
from support.harness import job
from support.loopback import Fault

from faults.__main__ import BEGIN, END
from faults.matrix import CASES, down_to_the_end

# If a signal comes as torch's agent enters the wrapper that measures its calls, before the wrapper notes the time, the
# agent itself fails and sends SIGTERM instead of the signal: another fault than the one that is tested.
AGENT_FAILED = "cannot access local variable 'start' where it is not associated with a value"
PARAMETERS = [
    pytest.param(case, id=case.fault, marks=getattr(pytest.mark, case.tier) if case.tier else ()) for case in CASES
]


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_run_tells_the_truth_and_loses_nothing(case, tmp_path):
    found = case.run(tmp_path / "first")
    if AGENT_FAILED in found.output:
        found = case.run(tmp_path / "again")
    assert case.wrong(found) == [], found.output


def test_the_page_has_each_fault_of_the_matrix_and_none_went_wrong():
    """`make reliability` writes it. A case that is new, renamed or removed since would not be on the page."""
    page = (Path(__file__).parents[2] / "docs" / "about" / "matrix.md").read_text()
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[3:]] == [
        case.fault for case in CASES
    ]


@pytest.mark.full
def test_rows_for_which_a_server_answers_503_to_the_end_are_sent_by_the_command_that_is_printed(tmp_path):
    """With older versions of wandb, which keep them in memory, too."""
    with job(tmp_path) as started:
        found = down_to_the_end(Fault.status(503))(started)
        assert (found.exit_codes, found.state, found.leaked) == ((), "running", ()), found.output
        assert found.seconds < 5 * jobs.TIME_SCALE  # kill_after_s=4
        (command,) = re.findall(r"To send the rest, run: (.+)", found.output)
        words, more = jobs.printed(command)
        send = [sys.executable, "-m", "flyteplugins_tracking", *words]
        sent = jobs.run(send, tmp_path, {**started.server.environment, **more})
        assert sent.returncode == 0, sent.output
        (run,) = started.server.runs
        assert sorted((row["pid"], row["n"]) for row in run.rows) == sorted(found.logged)
        assert run.exit_codes == [0]
