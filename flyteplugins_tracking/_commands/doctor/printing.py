"""The document as text and as JSON. It holds no key; as a second safeguard, keys are masked."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util.secrets import masked
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

# How many ranks are listed one by one.
_MOST_NAMED = 4
# The width of a line in a log.
_WIDTH = 120
_RUNS = {"run_mode": "run_mode", "rank_scope": "rank_scope", "runs": "runs", "run ids": "ids", "group": "groups"}
_RUNS |= {"who writes": "writers"}
_TRACKERS = {"tracker": "name", "version": "version", "runs go to": "place", "key": "credentials", "server": "server"}


def write(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the document. docs/reference/commands.md describes its keys."""
    shown = _masked(document)
    text = json.dumps(shown, indent=2) + "\n" if as_json else _as_text(shown)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have all characters of a path
    try:
        print(text, end="", flush=True)  # noqa: T201 the document
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def own_errors(errors: Sequence[Diagnostic], rank: int) -> str:
    """Return a rank's errors as text, for a rank that prints them itself."""
    lines = [line for error in errors for line in _lines(_masked({**error._asdict(), "ranks": None}))]
    return "".join(f"rank {rank}: {line}\n" for line in lines)


def _as_text(document: Mapping[str, Any]) -> str:
    detected, base_id, found = document["detected"], document["base_id"], document["diagnostics"]
    ids = base_id["source"] if base_id["base_id"] else f"{{base}} is {base_id['source']}"
    sections = {"Job": list(_job(detected)), f"Runs ({ids})": _table(_RUNS, document["plans"])}
    # If the variables contradict each other, no process knows its rank, and all print: only the error matters.
    if detected["error"] is None:
        sections["Trackers"] = _table(_TRACKERS, list(map(_cells, document["trackers"])))
        sections["Versions"] = [", ".join(f"{name} {version}" for name, version in document["versions"].items())]
    sections["Diagnostics"] = [line for entry in found for line in _lines(entry)]
    if document["ok"]:
        has_warnings = any(entry["level"] == "warning" for entry in found)
        sections["Diagnostics"].append("no errors: see the warnings above" if has_warnings else "nothing is wrong")
    return "\n".join(f"{title}\n" + "".join(map(_wrapped, lines)) for title, lines in sections.items() if lines)


def _job(detected: Mapping[str, Any]) -> Iterator[str]:
    job, pool, child_of = detected["job"], detected["pool"], detected["child_of"]
    if detected["error"] is not None:
        yield "unknown: see the diagnostics"
    elif job is not None:
        on_worker, worker = (
            _place(job["local_rank"], job["local_world_size"]),
            _place(job["worker_index"], job["num_workers"]),
        )
        facts = {
            "launcher": job["launcher"],
            "rank": f"{job['rank']} of {job['world_size']}; on its worker {on_worker}",
            "worker": worker,
            "restarts": str(job["restart_count"]),
            "job id": job["job_id"],
            "pool": pool and pool["name"],
        }
        yield from (f"{name:10} {fact}" for name, fact in facts.items() if fact)
    else:
        what = [f"a worker of {pool['name']}, since {pool['reason']}"] if pool else []
        if child_of is not None:
            what.append(f"rank {child_of} has started this process, which has a run of its own")
        yield f"none: {'; '.join(what) or 'one process'}"
    if detected["variables"]:
        yield "read from  " + " ".join(f"{name}={value}" for name, value in detected["variables"].items())


def _place(index: int | None, size: int | None) -> str:
    return "unknown" if index is None else f"{index} of {'?' if size is None else size}"


def _cells(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tracker's row: what is not known, or not installed, has no cell."""
    if state["version"] is None:
        return {"name": state["name"], "place": state["install"]}
    server = {None: "not asked", True: "answers", False: "see the diagnostics"}[state["reachable"]]
    known = {"version": state["version"] or "installed", "credentials": state["credentials"] or "none"}
    return {**state, **known, "server": server}


def _table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table: `columns` are the keys of its rows, by their titles. None if there are no rows."""
    cells = [list(columns), *([str(row.get(key) or "-") for key in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells] if rows else []


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    who = ""
    if entry["ranks"] is not None:
        workers = f" ({named('worker', entry['workers'])})" if entry["workers"] else ""
        who = f"{named('rank', entry['ranks'])}{workers}: "
    yield f"{entry['level']}: {who}{entry['text'].rstrip('.')}"
    if entry["fix"]:
        yield f"  -> {entry['fix']}"


def _wrapped(line: str) -> str:
    """Indent a line, and wrap a long one between words, so that addresses and commands stay in one piece."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    wrapper = textwrap.TextWrapper(width, "  ", indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line) + "\n"


def _masked(value: Any) -> Any:
    """Mask the keys in the strings of a value that JSON can have. The keys of dicts stay."""
    if isinstance(value, Mapping):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return masked(value, with_forms=False) if isinstance(value, str) else value


def named(kind: str, numbers: Sequence[int]) -> str:
    """Return numbers as text: `ranks 0-3` for a range, and at most four numbers otherwise."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"{kind} {first}"
    if last - first == len(numbers) - 1:
        return f"{kind}s {first}-{last}"
    shown = (
        [*map(str, numbers[: _MOST_NAMED - 1]), "...", str(last)] if len(numbers) > _MOST_NAMED else map(str, numbers)
    )
    return f"{kind}s {', '.join(shown)}"
