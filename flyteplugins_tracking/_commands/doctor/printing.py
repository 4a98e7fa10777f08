"""The diagnosis as text and as JSON. It holds no key; as a second safeguard, keys are masked."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._commands.doctor.job import named
from flyteplugins_tracking._util.secrets import masked
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

# The width of a line in a log.
_WIDTH = 120


def as_json(document: Mapping[str, Any]) -> str:
    """Return the diagnosis as one JSON document. docs/doctor.md describes it."""
    return json.dumps(_masked(document), indent=2) + "\n"


def as_text(document: Mapping[str, Any]) -> str:
    """Return the diagnosis as text, for a terminal or a log."""
    detected, base_id = document["detected"], document["base_id"]
    ids = base_id["source"] if base_id["base_id"] else f"{{base}} is {base_id['source']}"
    runs = [["run_mode", "rank_scope", "runs", "run ids", "group", "who writes"]]
    for row in document["plans"]:
        count, who = ("-", "refused: see the diagnostics") if row["error"] else (f"{row['runs']:,}", row["writers"])
        runs.append([row["run_mode"], row["rank_scope"], count, row["ids"], row["groups"] or "-", who])
    trackers = [["tracker", "version", "runs go to", "key", "server"]]
    for state in document["trackers"]:
        server = {None: "not asked", True: "answers", False: "see the diagnostics"}[state["reachable"]]
        cells = [state["version"] or "installed", state["place"] or "-", state["credentials"] or "none", server]
        trackers.append([state["name"], *(["-", state["install"], "-", "-"] if state["version"] is None else cells)])
    diagnostics = [line for entry in document["diagnostics"] for line in _lines(entry)]
    if document["ok"]:
        has_warnings = any(entry["level"] == "warning" for entry in document["diagnostics"])
        diagnostics.append("no errors: see the warnings above" if has_warnings else "nothing is wrong")
    sections = {"Job": list(_job(detected)), f"Runs ({ids})": _aligned(runs)}
    # If the variables contradict each other, no process knows its rank, and all print: only the error matters.
    if detected["error"] is None:
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        sections |= {"Trackers": _aligned(trackers), "Versions": [versions]}
    sections["Diagnostics"] = diagnostics
    blocks = [f"{title}\n" + "".join(map(_wrapped, lines)) for title, lines in sections.items() if lines]
    return masked("\n".join(blocks), with_forms=False)


def own_errors(errors: Sequence[Diagnostic], rank: int) -> str:
    """Return a rank's errors as text, for a rank that prints them itself."""
    lines = [line for error in errors for line in _lines({**error._asdict(), "ranks": None})]
    return masked("".join(f"rank {rank}: {line}\n" for line in lines), with_forms=False)


def _job(detected: Mapping[str, Any]) -> Iterator[str]:
    job, pool, child_of = detected["job"], detected["pool"], detected["child_of"]
    if detected["error"] is not None:
        yield "unknown: see the diagnostics"
    elif job is not None:
        yield f"launcher   {job['launcher']}"
        place = _place(job["local_rank"], job["local_world_size"])
        yield f"rank       {job['rank']} of {job['world_size']}; on its worker {place}"
        yield f"worker     {_place(job['worker_index'], job['num_workers'])}"
        yield f"restarts   {job['restart_count']}"
        if job["job_id"]:
            yield f"job id     {job['job_id']}"
        if pool is not None:
            yield f"pool       {pool['name']}"
    elif pool is None and child_of is None:
        yield "none: one process"
    else:
        if pool is not None:
            yield f"none: a worker of {pool['name']}, since {pool['reason']}"
        if child_of is not None:
            yield f"none: rank {child_of} has started this process, which has a run of its own"
    if detected["variables"]:
        yield "read from  " + " ".join(f"{name}={value}" for name, value in detected["variables"].items())


def _place(index: int | None, size: int | None) -> str:
    return "unknown" if index is None else f"{index} of {'?' if size is None else size}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has only its head."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table] if len(table) > 1 else []


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    who, ranks = "", entry["ranks"]
    if ranks is not None:
        workers = f" (worker {named(entry['workers'])})" if entry["workers"] else ""
        who = f"rank{'s' if len(ranks) > 1 else ''} {named(ranks)}{workers}: "
    yield f"{entry['level']}: {who}{entry['text'].rstrip('.')}"
    if entry["fix"]:
        yield f"  -> {entry['fix']}"


def _wrapped(line: str) -> str:
    """Indent a line, and wrap a long one between words, so that addresses and commands stay in one piece."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    line = f"  {line}"
    if len(line) <= width:
        return f"{line}\n"
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _masked(value: Any) -> Any:
    """Mask the keys in the texts of a JSON value. The keys of dicts stay."""
    if isinstance(value, Mapping):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(inner) for inner in value]
    return masked(value, with_forms=False) if isinstance(value, str) else value
