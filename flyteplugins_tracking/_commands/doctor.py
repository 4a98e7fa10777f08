"""Print the detected job, the runs that it would have, and what looks wrong. It changes nothing.

Start it instead of the training script: `torchrun ... -m flyteplugins_tracking`. The exit status is 1 if there is an
error, and 2 for wrong arguments. `flyteplugins-tracking send --help` is about sending what local directories have.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES, RunMode, plan
from flyteplugins_tracking._rank.topology import RecordingEnv, examine
from flyteplugins_tracking._util.modules import installed_version
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.secrets import masked
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking._util.threads import call_within
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.config import MODE, is_disabled
from flyteplugins_tracking.trackers.diagnostics import LEVELS, Diagnosis, Diagnostic, Level
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers
from flyteplugins_tracking.trackers.vendor_parts import client_version, known_faults

_OWN = "flyteplugins-tracking"
_START = "torchrun --nproc-per-node=2 train.py, or: srun --ntasks=2 python train.py"
_EXAMPLE = "example: srun python -m flyteplugins_tracking doctor --tracker wandb"
_DEFAULT = "wandb"
# How long a server may take to answer.
_ANSWER_S = 5.0
_SHOWN = ("accelerate", "flyte", "flytekit", "lightning", "torch", "transformers")
# How long rank 0 may take to ask servers and to print. A rank with an error must not end before: launchers end all
# ranks then.
_PRINTING_S = 6.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagnosis, and return the exit status: 1 if it has an error. Wrong arguments exit with 2.

    Each rank examines its own process and machine. Rank 0 prints all; the others their problems, with their rank before
    each line. With `--json` each rank prints one document, whose keys docs/reference/commands.md names.
    """
    parser = argparse.ArgumentParser("flyteplugins-tracking doctor", description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    tracker_help = "examine only this tracker; a problem with it is an error"
    parser.add_argument("--tracker", metavar="NAME", choices=names_of_trackers(), help=tracker_help)
    parser.add_argument("--offline", action="store_true", help="do not ask any server")
    # DeepSpeed's launcher and torch.distributed.launch add it to the arguments of a module. The variables have it too.
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with redirect_stdout(sys.stderr):  # other packages may print: that is not part of the document
        info, document = _examine(options.tracker, asks=not options.offline)
    document["ok"] = all(found.level != "error" for found in document["diagnostics"])
    document["diagnostics"] = [found._asdict() for found in document["diagnostics"]]
    rank = 0 if info is None else info.rank
    shown = json.loads(json.dumps(document), object_hook=_masked)  # it holds no key: a second safeguard
    if options.json:
        _print(json.dumps(shown, indent=2 if info is None else None))
    elif rank == 0:
        _print(_as_text(shown))
    else:
        problems = (entry for entry in shown["diagnostics"] if entry["level"] != "note")
        _print("\n".join(f"rank {rank}: {line}" for entry in problems for line in _lines(entry)))
    if rank > 0 and not document["ok"]:
        time.sleep(_PRINTING_S)
    return int(not document["ok"])


def _runs(info: DistributedInfo | None, base_id: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each mode and scope: which runs the job has whose first rank is `info`, and who writes to them.

    The ids are those of this rank and the last one, with the numbers between them. That takes for granted that
    its workers have the same size.
    """
    last, workers = info, 1
    if info is not None:
        workers = info.num_workers or math.ceil(info.world_size / (info.local_world_size or 1))
        size, end = info.local_world_size or math.ceil(info.world_size / workers), info.world_size - 1
        last = replace(info, rank=end, local_rank=min(size - 1, end), worker_index=min(workers - 1, end))
    for run_mode, rank_scope in itertools.product(RUN_MODES, RANK_SCOPES):
        kind = "rank" if rank_scope == "global" else "local rank"
        row = {"runs": 0, "ids": "-", "groups": None, "writers": "refused: see the diagnostics", "error": None}
        try:
            mode: RunMode = "new" if run_mode == "new" else "shared"  # the ids of "auto", where these may have no run
            plans = [plan(rank, mode, rank_scope, base_id) for rank in (info, last)]
            who = {"auto": f"{kind} 0", "shared": f"all {kind}s", "new": "each rank"}[run_mode]
            row |= {
                "runs": info.world_size if info and run_mode == "new" else 1 if rank_scope == "global" else workers,
                "ids": _pattern(*(planned.run_id for planned in plans)),
                "groups": _pattern(*(planned.group for planned in plans)),
                "writers": who if info else "this process",
            }
        except TopologyError as refusal:
            row["error"] = str(refusal)
        yield {"run_mode": run_mode, "rank_scope": rank_scope, **row}


def _pattern(first: str | None, last: str | None) -> str | None:
    """Return one pattern for two ids that differ in their numbers, such as `a-{0..3}`."""
    pairs = zip(re.split(r"(\d+)", first or ""), re.split(r"(\d+)", last or ""), strict=True)
    return "".join(one if one == other else f"{{{one}..{other}}}" for one, other in pairs) or None


def _examine(tracker: str | None, *, asks: bool) -> tuple[DistributedInfo | None, dict[str, Any]]:
    """Return this rank, and the document about this process, with its diagnostics.

    Args:
        tracker: The only tracker to examine; None for all trackers.
        asks: Whether to ask the servers.
    """
    env, info, error = RecordingEnv(os.environ), None, None
    try:
        info = examine(env).info
    except TopologyError as contradiction:
        error = str(contradiction)
    found = [*_check_job(info, error, env.read), *_check_mode()]
    # One process of a node asks the servers: thousands of requests at the same time could take them down.
    states = _trackers(tracker, asks and (info is None or info.local_rank in (0, None)), found)
    in_use = [state["name"] for state in states if state["is_chosen"] and state["version"] is not None]
    base_id, source = _base_id(info, in_use or [tracker or _DEFAULT], found)
    plans = [] if error or (info is not None and info.rank > 0) else list(_runs(info, base_id or "{base}"))
    found += [Diagnostic("warning", text) for text in dict.fromkeys(row["error"] for row in plans) if text]
    versions = {_OWN: installed_version(_OWN) or "not installed", "python": platform.python_version()}
    versions |= {name: version for name in _SHOWN if (version := installed_version(name)) is not None}
    versions |= {state["name"]: state["version"] for state in states if state["version"]}
    return info, {
        "schema": 1,
        "detected": {"job": None if info is None else dict(info), "variables": env.read, "error": error},
        "base_id": {"base_id": base_id, "source": source},
        "trackers": states,
        "versions": versions,
        "plans": plans,
        "diagnostics": sorted(found, key=lambda each: LEVELS.index(each.level)),
    }


def _check_job(info: DistributedInfo | None, error: str | None, variables: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the problems of this process's place in its job; `error` is how the `variables` contradict each other."""
    if error is not None:
        yield Diagnostic("error", error, f"unset {' '.join(variables)}, or start with: {_START}")
    elif info is None:
        yield Diagnostic("note", "no launcher was detected: this process counts as the only one, and has a run", _START)
        if os.environ.get("SLURM_JOB_ID"):
            text = "SLURM_JOB_ID is set, and no step has several tasks: each process counts as the only one"
            yield Diagnostic("warning", text, "srun python train.py, in the sbatch script")


def _check_mode() -> Iterator[Diagnostic]:
    try:
        if is_disabled():
            yield Diagnostic("warning", f"{MODE}=disabled: no rank has a run", f"unset {MODE}")
    except ConfigError as error:
        yield Diagnostic("error", str(error), f"unset {MODE}")


def _base_id(info: DistributedInfo | None, trackers: Sequence[str], found: list[Diagnostic]) -> tuple[str | None, str]:
    """Return the base id of the runs of these trackers, and where it comes from. Its problems are added to `found`.

    The id is None if it is known only when a run is opened.
    """
    from flyteplugins_tracking._job.identity import from_launcher
    from flyteplugins_tracking._job.starts import outer_job

    env, chosen = os.environ, list[str]()
    for tracker in map(find_tracker, trackers):
        for name in [name for name in tracker.run_id_variables if env.get(name)][:1]:
            text = f"{name}={env[name]}: every job with this variable writes to the same runs"
            found.append(Diagnostic("warning", text, f"unset {name}, unless you intend this"))
            chosen.append(name)
    if chosen:
        return env[chosen[0]], chosen[0]
    if "FLYTE_INTERNAL_EXECUTION_ID" in env:
        return None, "the name of the Flyte execution and node, or run and action"
    if info is None:
        outer = outer_job(env)
        return None, "a random id" if outer is None else f"{outer.variable}, the program and its arguments"
    if info.launcher == "torchelastic":
        return None, "the rendezvous id and a token that the ranks agree on"
    try:
        return None, f"{info.launcher}: this time {from_launcher(info, env, agreement=True).base_id}"
    except IdentityError as error:
        text = f"{error} Only run_mode='auto' with rank_scope='global' works without one"
        found.append(Diagnostic("warning", text))
        return None, "id= of tracking_init"


def _trackers(only: str | None, asks: bool, found: list[Diagnostic]) -> list[dict[str, Any]]:
    """Return the state of each tracker. The problems of the trackers that the user means are added to `found`.

    The user means the tracker `only`. Without it: the trackers that are set up here; if there are none, the default
    tracker; if that is not installed, all trackers.
    """
    level: Level = "error" if only else "warning"
    examined: dict[str, tuple[Tracker, Diagnosis, str | None]] = {}
    for name in [only] if only else names_of_trackers():
        try:
            tracker = find_tracker(name)
            examined[name] = tracker, tracker.diagnose(), _version_of(tracker)
        except (Exception, SystemExit) as error:  # another package's tracker may be broken
            text = f"tracker {name!r} cannot be examined: {first_line(error)}"
            found.append(Diagnostic(level, text))
    installed = [name for name, (_, _, version) in examined.items() if version is not None]
    chosen = [name for name, (_, diagnosis, _) in examined.items() if diagnosis.is_chosen]
    meant = [only] if only else chosen or ([_DEFAULT] if _DEFAULT in installed else installed)
    asked = {name: reach for name in installed if asks and name in meant and (reach := examined[name][1].reach)}
    with ThreadPoolExecutor() as pool:  # all at the same time
        answers = dict(zip(asked, pool.map(_answer, asked.values()), strict=True))
    states = []
    for name, (tracker, diagnosis, version) in examined.items():
        answer = answers.get(name)
        state = {"name": name, "version": version, "reachable": None if answer is None else answer == ""}
        states.append(state | {key: getattr(diagnosis, key) for key in ("place", "credentials", "is_chosen")})
        if name in meant and version is None:
            text = f"{tracker.title} is not installed{'' if only else ', but it is set up here'}"
            found.append(Diagnostic(level, text, f"pip install {tracker.distribution or tracker.package}"))
        elif name in meant:
            found += [*diagnosis.diagnostics, *known_faults(tracker.package or name)]
        if answer:
            text = f"{tracker.title}: the server at {diagnosis.place} cannot be used: {answer}"
            fix = "check its address, the key and the network (a proxy by HTTPS_PROXY)"
            found.append(Diagnostic("error", text, fix))
    if not installed and not only:
        found.append(Diagnostic("error", "no tracker is installed", f'pip install "{_OWN}[{_DEFAULT}]"'))
    return states


def _answer(reach: Callable[[float], object]) -> str:
    """Ask a server. Return "" if it can be used, else the reason why not."""
    try:
        call_within(2 * _ANSWER_S, reach, _ANSWER_S)  # a server that sends a byte at times takes longer
    except Exception as error:
        return first_line(error)
    return ""


def _version_of(tracker: Tracker) -> str | None:
    """Return the version of the vendor's package; "" if it is unknown, None if the package is not installed."""
    if tracker.package is not None and find_spec(tracker.package) is None:
        return None
    return client_version(tracker.package or tracker.name)


def _print(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may not have all characters of a path
    try:
        if text:
            print(text, flush=True)  # noqa: T201 the document
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _masked(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: masked(value, with_forms=False) if isinstance(value, str) else value for key, value in entry.items()}


def _as_text(document: Mapping[str, Any]) -> str:
    detected = document["detected"]
    # Addresses and commands stay in one piece.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    wrapper = textwrap.TextWrapper(width, "  ", "      ", break_long_words=False, break_on_hyphens=False)
    sections = {"Job": list(_job(detected))}
    # If the variables contradict each other, no process knows its rank, and all print: only the error matters.
    if detected["error"] is None:
        runs = _table("run_mode rank_scope runs ids groups writers", document["plans"])
        sections[f"Runs ({{base}} is {document['base_id']['source']})"] = runs
        sections["Trackers"] = _table("name version place credentials reachable", document["trackers"])
        sections["Versions"] = [", ".join(f"{name} {version}" for name, version in document["versions"].items())]
    sections["Diagnostics"] = [line for entry in document["diagnostics"] for line in _lines(entry)]
    if document["ok"]:
        sections["Diagnostics"].append("no errors")
    return "\n\n".join("\n".join([title, *map(wrapper.fill, lines)]) for title, lines in sections.items() if lines)


def _job(detected: Mapping[str, Any]) -> Iterator[str]:
    job = detected["job"]
    if detected["error"] is not None:
        yield "unknown: see the diagnostics"
    elif job is not None:
        known = {name: value for name, value in job.items() if value is not None and name != "launcher"}
        yield f"launcher   {job['launcher']}"
        yield f"place      {', '.join(f'{name} {value}' for name, value in known.items())}"
    else:
        yield "none: one process"
    if detected["variables"]:
        yield "read from  " + " ".join(f"{name}={value}" for name, value in detected["variables"].items())


def _table(columns: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys, words = columns.split(), {"": "-", "None": "-", "True": "yes", "False": "no"}
    cells = [keys, *([words.get(str(row[key]), str(row[key])) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _lines(entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"{entry['level']}: {entry['text'].rstrip('.')}"
    if entry["fix"]:
        yield f"  -> {entry['fix']}"
