"""The launcher that started this process, the variables that show it, and the run ids that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flyteplugins_tracking._commands.doctor.report import Detected, RunIds
from flyteplugins_tracking._rank import topology
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

Env = Mapping[str, str]


def detect(env: Env) -> Detected:
    """Return this process's place in its job, and the variables that the detectors have read."""
    recording = topology.RecordingEnv(env)
    try:
        found = topology.examine(recording)
    except TopologyError as error:
        return Detected(None, recording.read, str(error))
    child_of = None if found.parent is None else found.parent.rank
    return Detected(found.info, recording.read, pool=found.pool, child_of=child_of)


def base_id(info: DistributedInfo | None, env: Env, trackers: Sequence[str]) -> tuple[RunIds, list[Diagnostic]]:
    """Return the base id that runs of these trackers will have, if it is known before the ranks agree on one."""
    from flyteplugins_tracking._job.identity import from_launcher

    chosen = {name: variable for name in trackers if (variable := _variable(name, env))}
    if chosen:
        diagnostics = [
            diagnostic for name, variable in chosen.items() for diagnostic in _chosen_id_problems(variable, env, name)
        ]
        variable = next(iter(chosen.values()))
        return RunIds(env[variable], variable), diagnostics
    if "FLYTE_INTERNAL_EXECUTION_ID" in env:
        return RunIds(None, "the name of the Flyte execution and node, or run and action"), []
    if info is None:
        return RunIds(None, "a random id"), []
    if info.launcher == "torchelastic":
        return RunIds(None, "the rendezvous id and a token that the ranks agree on"), []
    try:
        this_time = from_launcher(info, env, agreement=True).base_id
        return RunIds(None, f"{info.launcher}: this time {this_time}"), []
    except IdentityError as error:
        return RunIds(None, "id= of tracking_init"), [
            Diagnostic(
                "warning",
                f"{error} Only run_mode='auto' with rank_scope='global' works without one",
                "pass id= to tracking_init: the same on every rank, and a new one for each job",
            )
        ]


def _variable(tracker: str, env: Env) -> str | None:
    """Return the tracker's own variable that chooses a run, if one is set."""
    from flyteplugins_tracking.trackers.registry import find_tracker

    return next((name for name in find_tracker(tracker).run_id_variables if env.get(name)), None)


def _chosen_id_problems(variable: str, env: Env, tracker: str) -> list[Diagnostic]:
    """Return what is wrong with an id from a variable. An exported id is the run of every job started afterwards."""
    from flyteplugins_tracking._config.config import TrackingConfig
    from flyteplugins_tracking.trackers.registry import find_tracker

    value = env[variable]
    try:
        find_tracker(tracker).check(TrackingConfig(id=value))
    except ConfigError as error:
        return [Diagnostic("error", f"{variable}={value}: {error}", f"unset {variable}, or choose another id")]
    if value in (env.get("KONDUKTOR_JOB_NAME"), env.get("FLYTE_INTERNAL_EXECUTION_ID")):
        return []
    text = f"{variable}={value}: every job with this variable writes to the same runs"
    return [Diagnostic("warning", text, f"unset {variable}, unless you intend this")]
