"""The report of a Flyte task: a table of the job's runs, as HTML.

The primary of the job's first run shows it. The other ranks send their runs to that one.
"""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._job.board import from_text, job_board, to_text
from flyteplugins_tracking._rank.info import DistributedInfo

if TYPE_CHECKING:
    from flyteplugins_tracking._runs.run import Run

TITLE = "Tracking"
# How long the first primary waits for the end of the others' runs.
_WAIT_S = 5.0
# How many values of a summary are shown.
_MAX_VALUES = 12
# Without it, the console shows the cells of a table side by side without a space.
_STYLE = (
    "<style>.tracking { font-family: sans-serif; line-height: 1.5 } .tracking table { margin-bottom: 1em } "
    ".tracking th, .tracking td { padding: 2px 1.2em 2px 0; text-align: left; vertical-align: top }</style>"
)


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, as the report shows it.

    Attributes:
        run_id: The run's id.
        rank: The rank that ended the run.
        exit_code: The status that the run ended with.
        url: The run's page; None if it has none.
        summary: The run's last values, as text.
    """

    run_id: str
    rank: int = 0
    exit_code: int = 0
    url: str | None = None
    summary: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run_id: str, url: str | None, rank: int, exit_code: int, summary: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a run. It has the first 12 values of the summary that can be shown as text."""
        plain = {key: value for key, value in summary.items() if isinstance(value, (bool, int, float, str))}
        shown = {key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in plain.items()}
        return cls(run_id, rank, exit_code, url, dict(list(shown.items())[:_MAX_VALUES]))


def show_run(show: Callable[[str, str], None], run: Run, exit_code: int, summary: Mapping[str, Any]) -> None:
    """On the first run's primary, show the runs of all ranks; on the others, send this rank's run to it.

    Args:
        show: Shows HTML in a tab of the task's report or deck, by its title.
        run: This rank's run.
        exit_code: The status that it has ended with.
        summary: Its last values.
    """
    info, name, other_runs = run.opener.info, run.tracker.name, _other_runs(run)
    outcomes = [Outcome.of(run.handle.id, run.handle.url, 0 if info is None else info.rank, exit_code, summary)]
    if info is not None and other_runs:
        with suppress(RuntimeError):  # the job's store does not answer: this rank's run is shown alone
            board = job_board(info, os.environ, f"report/{name}/{info.restart_count}")
            if board is not None and run.plan.first:
                sent = board.wait_for_texts(other_runs, _WAIT_S)
                outcomes += filter(None, (from_text(Outcome, text) for text in sent))
            elif board is not None:
                board.append(to_text(outcomes[0]))
    if run.plan.first:
        attempt = run.opener.context.run_metadata.get("attempt_number", 0)
        show(TITLE, page(name, info, attempt, outcomes, other_runs + 1 - len(outcomes)))


def _other_runs(run: Run) -> int:
    """Return the number of runs that the job has besides the first."""
    config, info = run.opener.config, run.opener.info
    if info is None or (config.run_mode != "new" and config.rank_scope == "global"):
        return 0
    return (info.world_size if config.run_mode == "new" else info.num_workers or 1) - 1


def page(tracker: str, info: DistributedInfo | None, attempt: int, outcomes: Sequence[Outcome], missing: int) -> str:
    """Return the task's world and its runs, as HTML.

    Args:
        tracker: The tracker's title.
        info: The first run's primary; None outside a distributed job.
        attempt: The attempt of the task, from 0.
        outcomes: The runs that have ended.
        missing: The number of runs that had not ended in time.
    """
    rows = [_row(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
    parts = [
        f"<h3>{html.escape(tracker)}</h3>",
        _table(("launcher", "workers", "ranks", "restarts", "attempt"), [_world(info, attempt)]),
        _table(("rank", "run", "state", "last values"), rows),
    ]
    if missing:
        runs = "run" if missing == 1 else "runs"
        parts.append(f"<p>{missing} more {runs} had not ended {_WAIT_S:g} s after this one.</p>")
    return f'<div class="tracking">{_STYLE}{"".join(parts)}</div>'


def _world(info: DistributedInfo | None, attempt: int) -> tuple[str, ...]:
    if info is None:
        return "none", "1", "1", "0", str(attempt)
    workers = "unknown" if info.num_workers is None else str(info.num_workers)
    return info.launcher, workers, str(info.world_size), str(info.restart_count), str(attempt)


def _row(outcome: Outcome) -> tuple[str, ...]:
    run_id = html.escape(outcome.run_id)
    is_page = outcome.url is not None and outcome.url.startswith(("https://", "http://"))
    run = run_id if not is_page or outcome.url is None else f'<a href="{html.escape(outcome.url)}">{run_id}</a>'
    state = "finished" if outcome.exit_code == 0 else f"failed ({outcome.exit_code})"
    values = "<br>".join(html.escape(f"{key}: {value}") for key, value in outcome.summary.items())
    return str(outcome.rank), run, state, values


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{cell}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
