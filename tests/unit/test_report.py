"""The report of a task in the process of one rank: what it says of the other ranks' runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from flyteplugins_tracking import DistributedInfo, override_distributed_info, tracking_init
from flyteplugins_tracking._flyte import report
from flyteplugins_tracking._job.board import Board, DirectoryStore
from flyteplugins_tracking._runs.call import Doubles, override
from flyteplugins_tracking._runs.context import ProcessContext
from flyteplugins_tracking.testing import RecordingTracker

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.run import Run


class Task(ProcessContext):
    """A task with a report: its pages, by their titles."""

    is_simulated = can_render_report = has_report = True
    pages: Mapping[str, str]

    def render_report(self, run: Run, exit_code: int, summary: Mapping[str, Any]) -> None:
        report.show_run(self.pages.__setitem__, run, exit_code, summary)


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Ends the run of a rank of 3, and returns the page that it shows; None if it shows none."""
    monkeypatch.setattr(report, "_WAIT_S", 0.1)
    monkeypatch.setattr(report, "job_board", lambda _, __, topic: Board(DirectoryStore(tmp_path / "board"), topic))

    @tracking_init(tracker=RecordingTracker, id="run", run_mode="new")
    def train(exit_code: int) -> None:
        raise SystemExit(exit_code)

    def end(rank: int, exit_code: int = 0) -> str | None:
        pages: dict[str, str] = {}
        info, doubles = DistributedInfo(rank, 3, rank, 3, 0, 1), Doubles(lambda own: own, lambda _: Task(pages=pages))
        with override_distributed_info(info), override(doubles), pytest.raises(SystemExit):
            train(exit_code)
        return pages.get(report.TITLE)

    return end


def test_the_first_primary_shows_the_runs_of_all_ranks(ended):
    assert [ended(2), ended(1, exit_code=3)] == [None, None]
    page = ended(0)
    states = ["finished", "failed (3)", "finished"]
    rows = [f"<td>{rank}</td><td>run-rank-{rank}</td><td>{state}</td>" for rank, state in enumerate(states)]
    assert [page.index(row) for row in rows] == sorted(page.index(row) for row in rows)
    assert "had not ended" not in page


@pytest.mark.parametrize(("others", "expected"), [([], "2 more runs"), ([1], "1 more run")])
def test_runs_that_end_too_late_are_counted(ended, others, expected):
    for rank in others:
        ended(rank)
    assert f"<p>{expected} had not ended 0.1 s after this one.</p>" in ended(0)


@pytest.mark.parametrize("url", ["javascript:alert(1)", "data:text/html,x", " javascript:x", "//host"])
def test_only_a_page_of_the_web_is_a_link(url):
    shown = report.page("W&B", None, 0, [report.Outcome("r", url=url)], 0)
    assert "<a " not in shown
    assert '<a href="https://h">' in report.page("W&B", None, 0, [report.Outcome("r", url="https://h")], 0)
