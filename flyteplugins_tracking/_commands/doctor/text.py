"""The report as text and as JSON. It holds no key; as a second safeguard, text that looks like a key is removed."""

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

from flyteplugins_tracking._commands.doctor.plans import named
from flyteplugins_tracking._commands.doctor.report import Detected, PlanRow, RankDiagnostic, Report, TrackerState
from flyteplugins_tracking._rank.info import DistributedInfo

# The width of a line in a log.
_WIDTH = 120
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8
_ORDER = ("error", "warning", "note")


def as_json(report: Report) -> str:
    """Return the report as one JSON document. docs/doctor.md describes it."""
    detected = report.detected
    document = {
        "schema": 1,
        "ok": report.status == 0,
        "detected": {
            "job": None if detected.info is None else dict(detected.info),
            "variables": dict(detected.variables),
            "error": detected.error,
            "pool": None if detected.pool is None else {"name": detected.pool.name, "reason": detected.pool.reason},
            "child_of": detected.child_of,
        },
        "base_id": asdict(report.ids),
        "plans": [asdict(row) for row in report.plans],
        "trackers": [asdict(state) for state in report.trackers],
        "versions": dict(report.versions),
        "ranks_heard": report.ranks_heard,
        "diagnostics": [
            {**entry.diagnostic._asdict(), "ranks": entry.ranks and list(entry.ranks), "workers": list(entry.workers)}
            for entry in _sorted(report.diagnostics)
        ],
    }
    return json.dumps(_redacted_in(document), indent=2) + "\n"


def as_text(report: Report) -> str:
    """Return the report as text, for a terminal or a log."""
    ids = report.ids.source if report.ids.base_id else f"{{base}} is {report.ids.source}"
    sections = [
        ("Job", _job(report)),
        (f"Runs ({ids})", _plans(report.plans)),
        # If the variables contradict each other, no process knows its rank, and all print: only the error matters.
        ("Trackers", [] if report.detected.error else _trackers(report.trackers)),
        ("Versions", [] if report.detected.error else [_versions(report.versions)]),
        ("Diagnostics", list(_diagnostics(report))),
    ]
    blocks = [f"{title}\n" + "".join(_wrapped(f"  {line}") for line in lines) for title, lines in sections if lines]
    return _redacted("\n".join(blocks))


def as_line(entry: RankDiagnostic, info: DistributedInfo) -> str:
    """Return a diagnostic as text, for a rank that prints it itself."""
    return _redacted("".join(f"rank {info.rank}: {line}\n" for line in _diagnostic_lines(entry, None)))


def _job(report: Report) -> list[str]:
    info, variables = report.detected.info, report.detected.variables
    read = " ".join(f"{name}={value}" for name, value in variables.items())
    lines = ["unknown: see the diagnostics"] if report.detected.error else list(_without_rank(report.detected))
    if info is not None:
        lines = [
            f"launcher   {info.launcher}",
            f"rank       {info.rank} of {info.world_size}; on its worker {_of(info.local_rank, info.local_world_size)}",
            f"worker     {_of(info.worker_index, info.num_workers)}",
            f"restarts   {info.restart_count}",
            *([f"job id     {info.job_id}"] if info.job_id else []),
            *([f"pool       {report.detected.pool.name}"] if report.detected.pool is not None else []),
        ]
    return [*lines, f"read from  {read}"] if read else lines


def _without_rank(detected: Detected) -> Iterator[str]:
    if detected.pool is not None:
        yield f"none: a worker of {detected.pool.name}, since {detected.pool.reason}"
    if detected.child_of is not None:
        yield f"none: rank {detected.child_of} has started this process, which has a run of its own"
    if detected.pool is None and detected.child_of is None:
        yield "none: one process"


def _of(index: int | None, size: int | None) -> str:
    return "unknown" if index is None else f"{index} of {'?' if size is None else size}"


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


def _diagnostics(report: Report) -> Iterator[str]:
    for entry in _sorted(report.diagnostics):
        yield from _diagnostic_lines(entry, report.detected.info)
    if report.status == 0:
        has_warnings = any(entry.diagnostic.level == "warning" for entry in report.diagnostics)
        yield "no errors: see the warnings above" if has_warnings else "nothing is wrong"


def _diagnostic_lines(entry: RankDiagnostic, info: DistributedInfo | None) -> Iterator[str]:
    who = ""
    if entry.ranks is not None and info is not None:
        workers = f" (worker {named(entry.workers)})" if entry.workers else ""
        who = f"rank{'s' if len(entry.ranks) > 1 else ''} {named(entry.ranks)}{workers}: "
    yield f"{entry.diagnostic.level}: {who}{entry.diagnostic.text.rstrip('.')}"
    if entry.diagnostic.fix:
        yield f"  -> {entry.diagnostic.fix}"


def _sorted(diagnostics: Sequence[RankDiagnostic]) -> list[RankDiagnostic]:
    return sorted(diagnostics, key=lambda entry: _ORDER.index(entry.diagnostic.level))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _wrapped(line: str) -> str:
    """Wrap a long line between words, so that addresses and commands stay in one piece."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    if len(line) <= width:
        return f"{line}\n"
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _redacted_in(value: Any) -> Any:
    """Redact the values in a document, and leave its keys as they are."""
    if isinstance(value, Mapping):
        return {key: _redacted_in(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted_in(inner) for inner in value]
    return _redacted(value) if isinstance(value, str) else value


def _redacted(text: str) -> str:
    """Remove the values of variables whose names suggest a key, and the credentials in addresses."""
    values: Any = {value.strip() for name, value in os.environ.items() if _SECRET.search(name)}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^\s\"]*@", "***@", text)
