"""The report as text and as JSON. No key is in either: what looks like one is taken out once more."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking.doctor.plans import named
from flyteplugins_tracking.doctor.report import OfRanks, PlanRow, Report, TrackerState

# In a log, which has no width of its own.
_WIDTH = 120
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8
_ORDER = ("error", "warning", "note")


def as_json(report: Report) -> str:
    """One document: see docs/doctor.md."""
    found = report.detected
    document = {
        "schema": 1,
        "ok": report.status == 0,
        "detected": {
            "job": None if found.info is None else dict(found.info),
            "variables": dict(found.variables),
            "error": found.error,
        },
        "base_id": asdict(report.ids),
        "plans": [asdict(row) for row in report.plans],
        "trackers": [asdict(state) for state in report.trackers],
        "versions": dict(report.versions),
        "ranks_heard": report.ranks_heard,
        "diagnostics": [
            {**asdict(one.diagnostic), "ranks": one.ranks and list(one.ranks), "workers": list(one.workers)}
            for one in _sorted(report.diagnostics)
        ],
    }
    return json.dumps(_redacted_in(document), indent=2) + "\n"


def as_text(report: Report) -> str:
    """For people, in a terminal or a log."""
    ids = report.ids.source if report.ids.base_id else f"{{base}} is {report.ids.source}"
    sections = [
        ("Job", _job(report)),
        (f"Runs ({ids})", _plans(report.plans)),
        # A rank that is not known may be any: all print then, and what is wrong first of all.
        ("Trackers", [] if report.detected.error else _trackers(report.trackers)),
        ("Versions", [] if report.detected.error else [_versions(report.versions)]),
        ("Findings", list(_findings(report))),
    ]
    blocks = [f"{title}\n" + "".join(_wrapped(f"  {line}") for line in lines) for title, lines in sections if lines]
    return _redacted("\n".join(blocks))


def as_line(found: OfRanks, info: DistributedInfo) -> str:
    """An error of a rank that prints for itself."""
    return _redacted("".join(f"rank {info.rank}: {line}\n" for line in _finding(found, None)))


def _job(report: Report) -> list[str]:
    info, variables = report.detected.info, report.detected.variables
    read = " ".join(f"{name}={value}" for name, value in variables.items())
    lines = ["not known: see the diagnostics"] if report.detected.error else ["none: one process"]
    if info is not None:
        lines = [
            f"launcher   {info.launcher}",
            f"rank       {info.rank} of {info.world_size}; on its worker {_of(info.local_rank, info.local_world_size)}",
            f"worker     {_of(info.worker_index, info.num_workers)}",
            f"restarts   {info.restart_count}",
            *([f"job id     {info.job_id}"] if info.job_id else []),
        ]
    return [*lines, f"read from  {read}"] if read else lines


def _of(index: int | None, size: int | None) -> str:
    return "not told" if index is None else f"{index} of {'?' if size is None else size}"


def _plans(rows: Sequence[PlanRow]) -> list[str]:
    if not rows:
        return []
    head = ["run_mode", "rank_scope", "runs", "run ids", "group", "who writes"]
    cells = [
        [
            row.run_mode,
            row.rank_scope,
            f"{row.runs:,}" if not row.error else "-",
            row.ids,
            row.groups or "-",
            row.writers,
        ]
        for row in rows
    ]
    for cell, row in zip(cells, rows, strict=True):
        cell[-1] = "refused: see the diagnostics" if row.error else cell[-1]
    return _table([head, *cells])


def _trackers(states: Sequence[TrackerState]) -> list[str]:
    head = ["tracker", "version", "runs go to", "key", "server"]
    rows = []
    for state in states:
        if state.version is None:
            rows.append([state.name, "-", state.install, "-", "-"])
            continue
        server = {None: "not asked", True: "answers", False: "see the diagnostics"}[state.reachable]
        rows.append([state.name, state.version or "installed", state.place or "-", state.credentials or "none", server])
    return _table([head, *rows]) if rows else []


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _findings(report: Report) -> Iterator[str]:
    for found in _sorted(report.diagnostics):
        yield from _finding(found, report.detected.info)
    if report.status == 0:
        has_warnings = any(of_ranks.diagnostic.level == "warning" for of_ranks in report.diagnostics)
        yield "no errors: see the warnings above" if has_warnings else "nothing is wrong"


def _finding(found: OfRanks, info: DistributedInfo | None) -> Iterator[str]:
    who = ""
    if found.ranks is not None and info is not None:
        of_workers = f" (worker {named(found.workers)})" if found.workers else ""
        who = f"rank{'s' if len(found.ranks) > 1 else ''} {named(found.ranks)}{of_workers}: "
    yield f"{found.diagnostic.level}: {who}{found.diagnostic.text.rstrip('.')}"
    if found.diagnostic.fix:
        yield f"  -> {found.diagnostic.fix}"


def _sorted(diagnostics: Sequence[OfRanks]) -> list[OfRanks]:
    return sorted(diagnostics, key=lambda found: _ORDER.index(found.diagnostic.level))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _wrapped(line: str) -> str:
    """A line that is too long goes on in the next; nothing in it is cut, so that addresses and commands stay whole."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    if len(line) <= width:
        return f"{line}\n"
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _redacted_in(value: Any) -> Any:
    """The same of a document, whose own words stay as they are."""
    if isinstance(value, Mapping):
        return {key: _redacted_in(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted_in(inner) for inner in value]
    return _redacted(value) if isinstance(value, str) else value


def _redacted(text: str) -> str:
    """Without the values of variables that are named as keys are, and without what stands in addresses for them."""
    values: Any = {value.strip() for name, value in os.environ.items() if _SECRET.search(name)}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^\s\"]*@", "***@", text)
