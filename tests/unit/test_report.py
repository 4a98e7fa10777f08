"""The report of a task in the process of one rank: what it says of the other ranks' runs."""

from __future__ import annotations

import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._flyte import report
from flyteplugins_tracking._job.board import Board, DirectoryStore
from flyteplugins_tracking._runs.run import EndedRun


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Ends the run of a rank of 3, and returns the page that it shows; None if it shows none."""
    monkeypatch.setattr(report, "_WAIT_S", 0.1)
    monkeypatch.setattr(report, "_board", lambda _, topic: Board(DirectoryStore(tmp_path / "board"), topic))

    def end(rank: int, exit_code: int = 0) -> str | None:
        pages: dict[str, str] = {}
        info = DistributedInfo(rank, 3, rank, 3, 0, 1)
        run = EndedRun("wandb", f"run-{rank}", None, exit_code, {"loss": 0.5}, info, rank == 0, 2, 0)
        report.show_run(pages.__setitem__, run)
        return pages.get(report.TITLE)

    return end


def test_the_first_primary_shows_the_runs_of_all_ranks(ended):
    assert [ended(2), ended(1, exit_code=3)] == [None, None]
    page = ended(0)
    states = ["finished", "failed (3)", "finished"]
    rows = [f"<td>{rank}</td><td>run-{rank}</td><td>{state}</td>" for rank, state in enumerate(states)]
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
