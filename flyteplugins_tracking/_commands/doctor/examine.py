"""What the doctor finds in one process: its place in the job, its trackers, and the packages that are installed.

A tracker's own checks are in its `diagnose`. The versions are from the packages' metadata: none is imported.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.topology import Detection, RecordingEnv, examine
from flyteplugins_tracking._util.modules import installed_version
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic, Level, check_directory
from flyteplugins_tracking.trackers.registry import find_tracker, names_of_trackers
from flyteplugins_tracking.trackers.vendor_parts import known_faults, numbers

OWN = "flyteplugins-tracking"
# No job has more ranks. A larger number is a mistake, and planning for it would take all memory.
MOST_RANKS = 100_000
_START = "torchrun --nproc-per-node=2 train.py, or: srun --ntasks=2 python train.py"
_DEFAULT = "wandb"
# How long the servers may take to answer. They are asked at the same time.
_ANSWER_S = 5.0
_OTHER_DECORATORS = ("flyteplugins-wandb", "flytekitplugins-wandb", "flyteplugins-mlflow", "flyteplugins-trackio")
_FRAMEWORKS = ("accelerate", "flyte", "flytekit", "flytekitplugins-kfpytorch", "flyteplugins-pytorch", "lightning")
_SHOWN = sorted((*_FRAMEWORKS, "torch", "transformers", *_OTHER_DECORATORS))
# A requirement of an extra: distribution, versions and extra. Those for development depend on the other extras.
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*([^;\s]*)\s*;\s*extra == ['\"](?!dev|examples)(\w+)['\"]$", re.MULTILINE)


def examine_process(tracker: str | None, *, asks: bool) -> tuple[DistributedInfo | None, dict[str, Any]]:
    """Return this rank, and the document about this process, with its diagnostics.

    Args:
        tracker: The only tracker to examine; None for all trackers.
        asks: Whether to ask the servers.

    Raises:
        ConfigError: There is no tracker of that name.
    """
    env, detection, error = RecordingEnv(os.environ), Detection(), None
    try:
        detection = examine(env)
    except TopologyError as contradiction:
        error = str(contradiction)
    info, pool, parent = detection.info, detection.pool, detection.parent
    # One process of a node asks the servers: thousands of requests at the same time could take them down.
    states, of_trackers = _trackers(tracker, asks=asks and (info is None or info.local_rank in (0, None)))
    in_use = [state["name"] for state in states if state["is_chosen"] and state["version"] is not None]
    base_id, source, of_id = _base_id(info, in_use or [tracker or _DEFAULT])
    versions = {OWN: installed_version(OWN) or "not installed", "python": platform.python_version()}
    versions |= {name: version for name in _SHOWN if (version := installed_version(name)) is not None}
    of_job = [*_check_job(info, error, env.read), *_check_directories()]
    return info, {
        "schema": 1,
        "detected": {
            "job": None if info is None else dict(info),
            "variables": env.read,
            "error": error,
            "pool": None if pool is None else {"name": pool.name, "reason": pool.reason},
            "child_of": None if parent is None else parent.rank,
        },
        "base_id": {"base_id": base_id, "source": source},
        "trackers": states,
        "versions": versions,
        "diagnostics": [*of_job, *of_id, *of_trackers, *_check_versions(versions)],
    }


def _check_job(info: DistributedInfo | None, error: str | None, variables: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the problems of this process's place in its job; `error` is how the `variables` contradict each other."""
    if error is not None:
        yield Diagnostic("error", error, f"unset {' '.join(variables)}, or start with: {_START}")
    elif info is not None:
        yield from _check_rank(info, os.environ)
    else:
        yield Diagnostic("note", "no launcher was detected: this process counts as the only one, and has a run", _START)
        if os.environ.get("SLURM_JOB_ID"):
            step = f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']}, and no step with several tasks"
            text, fix = f"{step}: each process counts as the only one", "srun python train.py, in the sbatch script"
            yield Diagnostic("warning", text, fix)


def _check_rank(info: DistributedInfo, env: Mapping[str, str]) -> Iterator[Diagnostic]:
    for size, counted in ((info.local_world_size, "ranks on this worker"), (info.num_workers, "workers")):
        if size is not None and size > info.world_size:
            text = f"{info.launcher} reports {size} {counted}, but only {info.world_size} ranks in all"
            yield Diagnostic("warning", text, f"start with: {_START}")
    if info.world_size > MOST_RANKS:
        yield Diagnostic("warning", f"{info.launcher} reports {info.world_size} ranks", f"start with: {_START}")
    if info.launcher == "kubeflow" and "PET_NPROC_PER_NODE" not in env and "LOCAL_RANK" not in env:
        text = f"LOCAL_RANK is not set: rank {info.rank} of {info.world_size} counts as the only process of its node"
        yield Diagnostic("warning", text, "torchrun train.py in each pod; or set LOCAL_RANK in each process")
    if info.world_size == 1:
        return
    if info.worker_index is None or info.local_rank is None:
        text = f"{info.launcher} does not report the worker (node) of rank {info.rank}: rank_scope='worker' is refused"
        fix = "start with torchrun or srun; or set NODE_RANK, LOCAL_RANK, RANK and WORLD_SIZE in each process"
        yield Diagnostic("warning", text, fix)
    slurms = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    values = {"MASTER_ADDR": slurms if info.launcher == "slurm" else "the host of rank 0", "MASTER_PORT": "29500"}
    missing = [name for name in values if not env.get(name)]
    if missing and find_spec("torch") is not None:
        text = f"{' and '.join(missing)} not set: torch.distributed's env:// cannot start a process group"
        yield Diagnostic("warning", text, "export " + " ".join(f'{name}="{values[name]}"' for name in missing))


def _check_directories() -> Iterator[Diagnostic]:
    text = "the working directory, where trackers keep files"
    fix = "cd to another; or export WANDB_DIR=... PLUTO_DIR=... TRACKIO_DIR=..."
    yield from check_directory(os.curdir, "warning", text, fix)
    text = "the home directory, where trackers keep caches and settings"
    yield from check_directory("~", "warning", text, "export HOME=/a/directory")
    from flyteplugins_tracking.trackers.node_group import socket_directory

    try:
        socket_directory()  # of the sockets by which the ranks of a node share a run: see `trackers.node_group`
    except OSError as error:
        text = f"run_mode='shared' needs a directory for temporary files: {error.strerror}"
        yield Diagnostic("warning", text, "export TMPDIR=/a/directory")


def _base_id(info: DistributedInfo | None, trackers: Sequence[str]) -> tuple[str | None, str, list[Diagnostic]]:
    """Return the base id of the runs of these trackers, where it comes from, and the problems with it.

    The id is None if it is known only when a run is opened.
    """
    from flyteplugins_tracking._job.identity import from_launcher

    env, chosen = os.environ, []
    for tracker in map(find_tracker, trackers):
        chosen += [(tracker, name) for name in tracker.run_id_variables if env.get(name)][:1]
    if chosen:
        variable = chosen[0][1]
        return env[variable], variable, [problem for pair in chosen for problem in _check_id(*pair)]
    if "FLYTE_INTERNAL_EXECUTION_ID" in env:
        return None, "the name of the Flyte execution and node, or run and action", []
    if info is None:
        return None, "a random id", []
    if info.launcher == "torchelastic":
        return None, "the rendezvous id and a token that the ranks agree on", []
    try:
        return None, f"{info.launcher}: this time {from_launcher(info, env, agreement=True).base_id}", []
    except IdentityError as error:
        text = f"{error} Only run_mode='auto' with rank_scope='global' works without one"
        fix = "pass id= to tracking_init: the same on every rank, and a new one for each job"
        return None, "id= of tracking_init", [Diagnostic("warning", text, fix)]


def _check_id(tracker: Tracker, variable: str) -> Iterator[Diagnostic]:
    """Yield what is wrong with an id from a variable. An exported id is the run of every job started afterwards."""
    value = os.environ[variable]
    try:
        tracker.check(TrackingConfig(id=value))
    except ConfigError as error:
        yield Diagnostic("error", f"{variable}={value}: {error}", f"unset {variable}, or choose another id")
        return
    if value not in map(os.environ.get, ("KONDUKTOR_JOB_NAME", "FLYTE_INTERNAL_EXECUTION_ID")):
        text = f"{variable}={value}: every job with this variable writes to the same runs"
        yield Diagnostic("warning", text, f"unset {variable}, unless you intend this")


def _trackers(only: str | None, *, asks: bool) -> tuple[list[dict[str, Any]], list[Diagnostic]]:
    """Return the state of each tracker, and the problems of the trackers that the user means.

    The user means the tracker `only`. Without it: the trackers that are set up here; if there are none, the default
    tracker; if that is not installed, all trackers.
    """
    level: Level = "error" if only else "warning"
    examined: dict[str, tuple[Tracker, Diagnosis, str | None]] = {}
    states, problems = list[dict[str, Any]](), list[Diagnostic]()
    if only:
        find_tracker(only)
    for name in [only] if only else names_of_trackers():
        try:
            tracker = find_tracker(name)
            examined[name] = tracker, tracker.diagnose(), _version_of(tracker)
        except (Exception, SystemExit) as error:  # another package's tracker may be broken
            text = f"tracker {name!r} cannot be examined: {str(error) or type(error).__name__}"
            problems.append(Diagnostic(level, text))
    installed = [name for name, (_, _, version) in examined.items() if version is not None]
    chosen = [name for name, (_, diagnosis, _) in examined.items() if diagnosis.is_chosen]
    meant = [only] if only else chosen or ([_DEFAULT] if _DEFAULT in installed else installed)
    answers = _ask({name: examined[name][1] for name in installed if asks and name in meant})
    for name, (tracker, diagnosis, version) in examined.items():
        install, answer = f"pip install {tracker.distribution or tracker.package}", answers.get(name)
        state = {"name": name, "title": tracker.title, "version": version, "install": install}
        state |= {key: getattr(diagnosis, key) for key in ("place", "credentials", "is_chosen")}
        states.append({**state, "reachable": None if answer is None else answer == ""})
        if name in meant and version is None:
            text = f"{tracker.title} is not installed{'' if only else ', but it is set up here'}"
            problems.append(Diagnostic(level, text, install))
        elif name in meant:
            problems += [*diagnosis.diagnostics, *known_faults(tracker.package or name)]
        if answer:
            text = f"{tracker.title}: the server at {diagnosis.place} cannot be used: {answer}"
            fix = "check its address and the network (a proxy by HTTPS_PROXY); or log to local files"
            problems.append(Diagnostic("error", text, f"{fix}: if_unavailable='degrade'"))
    if not installed and not only:
        problems.append(Diagnostic("error", "no tracker is installed", f'pip install "{OWN}[{_DEFAULT}]"'))
    return states, problems


def _ask(diagnoses: Mapping[str, Diagnosis]) -> dict[str, str]:
    """Ask all servers at the same time. Return "" for each that can be used, else the reason why not."""
    reaches = {name: diagnosis.reach for name, diagnosis in diagnoses.items() if diagnosis.reach is not None}
    answers = dict.fromkeys(reaches, f"it does not answer within {_ANSWER_S:.0f} s")

    def ask(name: str, reach: Callable[[float], object]) -> None:
        try:
            reach(_ANSWER_S)
            answers[name] = ""
        except Exception as error:
            answers[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=ask, args=each, daemon=True) for each in reaches.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ANSWER_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)  # a late answer does not change it


def _version_of(tracker: Tracker) -> str | None:
    """Return the version of the vendor's package; "" if it is unknown, None if the package is not installed."""
    if tracker.package is not None and find_spec(tracker.package) is None:
        return None
    package = tracker.package or tracker.name
    extras = [distribution for distribution, (_, extra) in _requirements().items() if extra == tracker.name]
    return installed_version(package, *extras, f"{package}-skinny") or ""  # mlflow-skinny is enough


def _check_versions(installed: Mapping[str, str]) -> Iterator[Diagnostic]:
    """Yield the installed packages that do not work together."""
    for distribution, (required, extra) in _requirements().items():
        version = installed_version(distribution) or ""
        bounds = re.findall(r"(<|>=)([\d.]+)", required)  # the extras have no other operators
        if version and any((numbers(version) < numbers(bound)) is (operator == ">=") for operator, bound in bounds):
            text = f"{distribution} {version} is installed, but this library needs {required}"
            yield Diagnostic("warning", text, f'pip install --upgrade "{OWN}[{extra}]"')
    for name in _OTHER_DECORATORS:
        if name in installed:
            text = f"{name} is installed: do not stack its decorators with these. They do not know of each other"
            fix = "from flyteplugins_tracking.compat.wandb import wandb_init" if name.endswith("wandb") else ""
            yield Diagnostic("note", text, fix)


def _requirements() -> dict[str, tuple[str, str]]:
    """Return the versions that this library's extras require, and the extra, by distribution."""
    texts = metadata.requires(OWN) or () if installed_version(OWN) else ()
    # Extras that consist of others come before these: they are in the order of the alphabet, from `demo` to `wandb`.
    return {distribution: (required, extra) for distribution, required, extra in _REQUIREMENT.findall("\n".join(texts))}
