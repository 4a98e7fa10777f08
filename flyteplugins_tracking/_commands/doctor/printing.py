"""The diagnosis as text and as JSON. It holds no key; as a second safeguard, text that looks like a key is removed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._commands.doctor.plans import named

# The width of a line in a log.
_WIDTH = 120
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_SHORTEST_SECRET = 8
_ORDER = ("error", "warning", "note")


def as_json(document: Mapping[str, Any]) -> str:
    """Return the diagnosis as one JSON document. docs/doctor.md describes it."""
    return json.dumps(_redacted({**document, "diagnostics": _sorted(document)}), indent=2) + "\n"


def as_text(document: Mapping[str, Any]) -> str:
    """Return the diagnosis as text, for a terminal or a log."""
    detected, base_id = document["detected"], document["base_id"]
    ids = base_id["source"] if base_id["base_id"] else f"{{base}} is {base_id['source']}"
    sections = [("Job", list(_job(detected))), (f"Runs ({ids})", _plans(document["plans"]))]
    # If the variables contradict each other, no process knows its rank, and all print: only the error matters.
    if detected["error"] is None:
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        sections += [("Trackers", _trackers(document["trackers"])), ("Versions", [versions])]
    sections.append(("Diagnostics", list(_diagnostics(document))))
    blocks = [f"{title}\n" + "".join(_wrapped(f"  {line}") for line in lines) for title, lines in sections if lines]
    return str(_redacted("\n".join(blocks)))


def errors_of(document: Mapping[str, Any], rank: int) -> str:
    """Return the errors as text, for a rank that prints them itself."""
    entries = [entry for entry in document["diagnostics"] if entry["level"] == "error"]
    return str(_redacted("".join(f"rank {rank}: {line}\n" for entry in entries for line in _lines(entry))))


def _job(detected: Mapping[str, Any]) -> Iterator[str]:
    job, pool, child_of = detected["job"], detected["pool"], detected["child_of"]

    def of(index: int | None, size: int | None) -> str:
        return "unknown" if index is None else f"{index} of {'?' if size is None else size}"

    if detected["error"] is not None:
        yield "unknown: see the diagnostics"
    elif job is not None:
        place = of(job["local_rank"], job["local_world_size"])
        yield f"launcher   {job['launcher']}"
        yield f"rank       {job['rank']} of {job['world_size']}; on its worker {place}"
        yield f"worker     {of(job['worker_index'], job['num_workers'])}"
        yield f"restarts   {job['restart_count']}"
        yield from [f"job id     {job['job_id']}"] if job["job_id"] else []
        yield from [f"pool       {pool['name']}"] if pool is not None else []
    elif pool is None and child_of is None:
        yield "none: one process"
    else:
        yield from [f"none: a worker of {pool['name']}, since {pool['reason']}"] if pool is not None else []
        if child_of is not None:
            yield f"none: rank {child_of} has started this process, which has a run of its own"
    if detected["variables"]:
        yield "read from  " + " ".join(f"{name}={value}" for name, value in detected["variables"].items())


def _plans(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    table = [["run_mode", "rank_scope", "runs", "run ids", "group", "who writes"]]
    for row in plans:
        runs, who = ("-", "refused: see the diagnostics") if row["error"] else (f"{row['runs']:,}", row["writers"])
        table.append([row["run_mode"], row["rank_scope"], runs, row["ids"], row["groups"] or "-", who])
    return _aligned(table)


def _trackers(states: Sequence[Mapping[str, Any]]) -> list[str]:
    table = [["tracker", "version", "runs go to", "key", "server"]]
    for state in states:
        server = {None: "not asked", True: "answers", False: "see the diagnostics"}[state["reachable"]]
        cells = [state["version"] or "installed", state["place"] or "-", state["credentials"] or "none", server]
        table.append([state["name"], *(cells if state["version"] is not None else ["-", state["install"], "-", "-"])])
    return _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; none if it has only its head."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table] if len(table) > 1 else []


def _diagnostics(document: Mapping[str, Any]) -> Iterator[str]:
    for entry in _sorted(document):
        yield from _lines(entry)
    if document["ok"]:
        has_warnings = any(entry["level"] == "warning" for entry in document["diagnostics"])
        yield "no errors: see the warnings above" if has_warnings else "nothing is wrong"


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    who, ranks = "", entry["ranks"]
    if ranks is not None:
        workers = f" (worker {named(entry['workers'])})" if entry["workers"] else ""
        who = f"rank{'s' if len(ranks) > 1 else ''} {named(ranks)}{workers}: "
    yield f"{entry['level']}: {who}{entry['text'].rstrip('.')}"
    if entry["fix"]:
        yield f"  -> {entry['fix']}"


def _sorted(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(document["diagnostics"], key=lambda entry: _ORDER.index(entry["level"]))


def _wrapped(line: str) -> str:
    """Wrap a long line between words, so that addresses and commands stay in one piece."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    if len(line) <= width:
        return f"{line}\n"
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def _redacted(value: Any) -> Any:
    """Remove the values of variables whose names suggest a key, and the credentials in addresses. Keep dicts' keys."""
    if isinstance(value, Mapping):
        return {key: _redacted(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(inner) for inner in value]
    if not isinstance(value, str):
        return value
    secrets = {secret.strip() for name, secret in os.environ.items() if _SECRET.search(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            value = value.replace(secret, "***")
    return re.sub(r"(?<=://)[^\s\"]*@", "***@", value)
