"""Which launcher started this process, told by which variables, and which run ids that gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flyteplugins_tracking._job import topology
from flyteplugins_tracking._job.info import DistributedInfo
from flyteplugins_tracking.doctor.report import Detected, RunIds
from flyteplugins_tracking.errors import ConfigError, IdentityError, TopologyError
from flyteplugins_tracking.trackers.diagnostics import Finding

Env = Mapping[str, str]


class Reading(Mapping[str, str]):
    """Variables that remember which of them were asked for, and were set."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.read: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        self.read[name] = self._env[name]
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._env)

    def __len__(self) -> int:
        return len(self._env)


def detect(env: Env) -> Detected:
    """The place of this process, and the variables that the detectors have read for it."""
    reading = Reading(env)
    try:
        info = topology.detect(reading)
    except TopologyError as error:
        return Detected(None, reading.read, str(error))
    return Detected(info, reading.read)


def base_id(info: DistributedInfo | None, env: Env, trackers: Sequence[str]) -> tuple[RunIds, list[Finding]]:
    """What `{base}` will be with these trackers, as far as can be told without a part in the job's agreement."""
    from flyteplugins_tracking._job.identity import from_launcher

    chosen = {name: variable for name in trackers if (variable := _variable(name, env))}
    if chosen:
        findings = [finding for name, variable in chosen.items() for finding in _of_chosen(variable, env, name)]
        variable = next(iter(chosen.values()))
        return RunIds(env[variable], variable), findings
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
            Finding(
                "warning",
                f"{error} Only run_mode='auto' with rank_scope='global' does without",
                "pass id= to tracking_init, the same on every rank and another for each job",
            )
        ]


def _variable(tracker: str, env: Env) -> str | None:
    """The tracker's own variable that chooses a run, if one is set."""
    from flyteplugins_tracking.trackers.registry import find_tracker

    return next((name for name in find_tracker(tracker).run_id_variables if env.get(name)), None)


def _of_chosen(variable: str, env: Env, tracker: str) -> list[Finding]:
    """An id that is exported once is the run of all that is started afterwards."""
    from flyteplugins_tracking._config.config import TrackingConfig
    from flyteplugins_tracking.trackers.registry import find_tracker

    value = env[variable]
    try:
        find_tracker(tracker).check(TrackingConfig(id=value))
    except ConfigError as error:
        return [Finding("error", f"{variable}={value}: {error}", f"unset {variable}, or choose another id")]
    if value in (env.get("KONDUKTOR_JOB_NAME"), env.get("FLYTE_INTERNAL_EXECUTION_ID")):
        return []
    text = f"{variable}={value}: every job that is started with it goes on with the same runs"
    return [Finding("warning", text, f"unset {variable}, unless that is meant")]
