"""The user's configuration: `TrackingConfig`, checked when the decorator is applied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import (
    RANK_SCOPES,
    RUN_MODES,
    PrimaryRank,
    RankScope,
    RunMode,
    primary_rank_of,
)
from flyteplugins_tracking._util.checks import (
    check_choice,
    check_flag,
    check_seconds,
    check_text,
    check_texts,
    is_given,
)
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.record import Record, replace
from flyteplugins_tracking.errors import ConfigError

IfUnavailable = Literal["raise", "degrade"]
"""Whether to raise an error or to degrade if the service cannot be used when a run is opened."""

# The one key of this library in a run's config, with all that it adds below: no script has an argument of that name.
OWN = "tracking_init"
# That of `tracking_init`: its run files have no suffix.
DEFAULT_TRACKER = "wandb"
# The roles of a run's owner, below that key; and the owner's name beside those of roles.
ROLES, OWNER = "roles", "owner"
# What this library's keys begin with, in rows and in the config.
_NOT_ROLES = frozenset({OWN, OWNER, ROLES, "ranks", "nodes", "failure", "hang", "stop", "system"})

# Set by the user, to turn all trackers off.
MODE = "FLYTE_TRACKING_MODE"


def is_disabled() -> bool:
    """Whether `FLYTE_TRACKING_MODE` turns all trackers off: "disabled" does, "enabled" is as if it was not set.

    Raises:
        ConfigError: It has another value.
    """
    mode = os.environ.get(MODE) or "enabled"
    check_choice(MODE, mode, ("disabled", "enabled"))
    return mode == "disabled"


# The last seconds before the launcher's SIGKILL, in which a process whose run has ended comes to its own end.
_END_S = 5.0


# How the value of an argument is checked, by the type of its field. None is allowed where the type has it. The registry
# checks `tracker`; `__post_init__` checks those of other types.
_CHECKS: Mapping[Any, Callable[[str, Any], object]] = {
    "RunMode": lambda name, value: check_choice(name, value, RUN_MODES),
    "RankScope": lambda name, value: check_choice(name, value, RANK_SCOPES),
    "PrimaryRank": lambda _, value: _check_primary_rank(value),
    "IfUnavailable": lambda name, value: check_choice(name, value, get_args(IfUnavailable)),
    "bool": check_flag,
    "float": check_seconds,
    "float | None": check_seconds,
    "str": lambda name, value: check_text(name, value, is_optional=False),
    "str | None": check_text,
}


# What nobody has passed.
_NOTHING: Mapping[str, Any] = {}


class TrackingConfig(Record):
    """The arguments of one `tracking_init`, checked, and `options`: those that only this tracker has.

    Each is written down here and nowhere else. `make includes` writes the signature and the docstring of
    `tracking_init`, and docs/reference/api.md, from the fields, their defaults and their descriptions. The type of a
    field says how its value is checked: see `_CHECKS`.
    """

    _hidden = ("secret", "options", "given")

    tracker: Any = "wandb"
    """The tracker's name: "wandb", "pluto", "mlflow", "trackio", or one of the entry point group
    `flyteplugins_tracking.trackers`; or a `flyteplugins_tracking.trackers.Tracker`."""

    run_mode: RunMode = "auto"
    """Which ranks have a run. "auto": one run, on the primary rank, which is rank 0 unless `primary_rank` names another
    one. "new": a run for every rank. "shared": one run that all ranks log to; the primary rank ends it."""

    rank_scope: RankScope = "global"
    """Whether `run_mode` holds once for the job ("global") or once for each worker ("worker"), which is a node."""

    # In the config that a tracker gets, it is the primary's number in its scope, from 0.
    primary_rank: PrimaryRank = 0
    """The primary rank, or with rank_scope="worker" the primary local rank of each node. Negative numbers count from
    the end: -1 is the last one, on which Megatron-LM logs. Or a callable of `DistributedInfo` that
    returns the same int on every rank. No effect with "new"."""

    id: str | None = None
    """The base of the run ids: the same on every rank, and another for each job, unless they share a run with `roles`.
    By default the ranks agree on one."""

    run_file: str | None = None
    """A file in which the job keeps its run's id, for instance beside its checkpoints: a later job that finds it goes
    on in the run. A function that returns by itself has finished the training: the next job has a new run. After a stop
    by `should_stop()`, the next job goes on in this one. Only the first primary rank needs to see the file. Not
    together with `id` and `role`."""

    roles: Sequence[str] | None = None
    """The roles of other jobs that join the run of this one, which owns and ends it: each calls a function with
    `role=` and the same `id`. One that is not listed may join too. Only with W&B."""

    role: str | None = None
    """The role under which this job joins the run of a job with `roles=`. The keys of this job begin with `{role}/`, it
    counts its own steps, and its end does not end the run. It waits up to `init_timeout_s` for the run, and never
    creates it. Only with W&B, and with run_mode="auto"."""

    project: str | None = None
    """The runs' project; None for the tracker's default."""

    group: str | None = None
    """The runs' group, instead of the one that `run_mode` and `rank_scope` give."""

    name: str | None = None
    """The run's name. As with `tags`, `notes` and `config`, only that of the primary rank counts."""

    tags: Sequence[str] | Mapping[str, Any] | None = None
    """The run's tags. A mapping gives tags such as "team=vision", from which MLflow gets the key and the value."""

    notes: str | None = None
    """The run's notes."""

    config: Any = None
    """The run's config: a mapping, a dataclass, a namespace, or anything like these, such as a Hydra config; or, for
    W&B, the path of a file. Values that JSON cannot hold are shown as text."""

    secret: Any = None
    """A flytekit `Secret`, or a callable without arguments that returns the API key. Read on the ranks
    that open a run."""

    if_unavailable: IfUnavailable = "degrade"
    """What happens if the service is away at the start: no network, no answer in time, HTTP 402 (a full quota), 408,
    425, 429 or 5xx. "degrade": the run is logged to local files, which the next attempt sends, or
    `flyteplugins-tracking send`. "raise": a `TrackerUnavailableError`. A missing key, a refusal and a role that finds
    no run are errors in both cases."""

    init_timeout_s: float = 30.0
    """Seconds that opening the run may take. Before that, the ranks agree on the run's id, which may take 30 s more."""

    kill_after_s: float = 30.0
    """How long your launcher waits between SIGTERM and SIGKILL, in seconds: 30 by default, as torchrun, Slurm and
    Kubernetes. A loop that calls `should_stop()` and the run's end have 5 s less than that, or half of it if it is
    below 10 s. An end without a SIGTERM lasts as long as the service takes data."""

    hang_timeout_s: float | None = None
    """If neither a row nor a `heartbeat()` comes for this many seconds, the library writes where each rank is to the
    run and to the log of the rank with the run. Each rank writes its stacks to its own log. Nothing is ended. None for
    never."""

    pulse_s: float | None = None
    """Seconds between two measurements of which rank is slow and of how busy each node is. The next row of the primary
    rank has them: as `ranks/*` and, with the extra `pulse`, as `nodes/*`. It uses no collective. None for never."""

    stop_before_s: float | None = None
    """Seconds before the time limit at which `should_stop()` returns True. The limit is that of a Slurm job
    (SLURM_JOB_END_TIME), or the `timeout=` of a Flyte task below this decorator. None for never."""

    rank_prefix: bool = False
    """In a shared run, put `rank_{rank}/` before the keys that a rank logs."""

    step_metric: str = "global_step"
    """The column for the `step=` of `log`, where the service cannot take it as its own step: in a shared run, and after
    a job has gone back to its checkpoint."""

    download_logs: bool = False
    """Make the run's local files an output of the Flyte task, if the task has no Elastic."""

    options: Mapping[str, Any] = _NOTHING
    """The arguments that only this tracker has, passed through."""

    given: frozenset[str] = frozenset()
    """The names of the fields above that the user set, without `options`; the others have their defaults."""

    def __post_init__(self) -> None:
        for name, kind in type(self).__annotations__.items():
            value = getattr(self, name)
            if kind in _CHECKS and (value is not None or "None" not in kind):
                _CHECKS[kind](name, value)
        _check_secret(self.secret)
        self.__dict__["tags"] = check_texts("tags", self.tags)
        self.__dict__["roles"] = check_texts("roles", self.roles)
        if not isinstance(self.config, str):
            self.__dict__["config"] = plain_config(self.config)
        self._check_run_file()
        self._check_roles()

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TrackingConfig:
        """Return the config of these arguments by name; those that are not fields become `options`.

        An empty string is not given, as argparse's defaults often are; nor are empty tags.

        Raises:
            ConfigError: The value of a field is invalid.
        """
        field_values = {name: value for name, value in arguments.items() if name in OWN_ARGUMENTS}
        if "tags" in field_values:
            field_values["tags"] = _tags(field_values["tags"])
        if isinstance(field_values.get("run_file"), os.PathLike):
            field_values["run_file"] = os.fspath(field_values["run_file"])
        given = {name: value for name, value in field_values.items() if name not in _MAY_BE_EMPTY or is_given(value)}
        others = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
        options = {name: value if is_given(value) else None for name, value in others.items()}
        return cls(**given, options=options, given=frozenset(given))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments from which `from_arguments` makes an equal config."""
        return {**self.options, **{name: getattr(self, name) for name in self.given}}

    def _check_run_file(self) -> None:
        for name in ("id", "role"):
            if self.run_file is not None and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ConfigError(f"{name}={value!r} names the run, and so does run_file=: pass one of the two")
        if "://" in (self.run_file or ""):
            raise ConfigError(f"run_file={self.run_file!r} is an address: pass the path of a file on a disk")

    def _check_roles(self) -> None:
        for name in (*(self.roles or ()), *filter(None, [self.role])):
            _check_role(name)
        if self.role is not None and self.roles is not None:
            raise ConfigError(
                f"role={self.role!r} joins the run of another job, and roles= owns a run: pass one of the two"
            )
        if self.role is not None and (self.run_mode, self.rank_scope) != ("auto", "global"):
            given = f"run_mode={self.run_mode!r}, rank_scope={self.rank_scope!r}"
            raise ConfigError(f"role={self.role!r} has one writer, the job's primary rank: leave out {given}")
        if self.roles is not None and (self.run_mode == "new" or self.rank_scope == "worker"):
            wrong = "run_mode='new'" if self.run_mode == "new" else "rank_scope='worker'"
            raise ConfigError(f"roles= needs one run for the job, and {wrong} makes several: leave it out")

    @property
    def has_roles(self) -> bool:
        """Whether other jobs write to the run, or own it."""
        return self.roles is not None or self.role is not None

    @property
    def finish_timeout_s(self) -> float:
        """Seconds that finishing may take after SIGTERM or without progress, and a loop with `should_stop()` may go on.

        `kill_after_s` less 5 s, in which the process ends; less half of it, if that is shorter than 5 s.
        """
        return self.kill_after_s - min(_END_S, self.kill_after_s / 2)

    @property
    def finish_limit(self) -> str:
        """`finish_timeout_s` in messages."""
        return f"{self.finish_timeout_s:g} s (kill_after_s={self.kill_after_s:g})"

    def with_defaults(self, propagated: Mapping[str, Any]) -> TrackingConfig:
        """Return this config, with the `propagated` arguments for those that it does not set.

        Raises:
            ConfigError: As `from_arguments`.
        """
        return TrackingConfig.from_arguments(merged(propagated, self.arguments)) if propagated else self

    def for_parent(self, parent: Mapping[str, Any]) -> TrackingConfig:
        """Return this config for the run of a calling task: at that run's place, and with that run's `config`.

        Raises:
            ConfigError: As `from_arguments`.
        """
        overrides = {name: value for name, value in parent.items() if name != "id"}
        return TrackingConfig.from_arguments(merged(replace(self, config={}).arguments, overrides))

    def in_world(self, info: DistributedInfo | None) -> TrackingConfig:
        """Return this config with `primary_rank` as the primary's number, from 0, in the scope of the rank `info`.

        A callable is called here, and nowhere else.

        Raises:
            ConfigError: The callable has returned anything but an int.
            TopologyError: The scope does not have this rank.
        """
        primary = primary_rank_of(info, self.run_mode, self.rank_scope, self.primary_rank)
        return self if primary == self.primary_rank else replace(self, primary_rank=primary)


# The arguments that `tracking_init` has for every tracker.
OWN_ARGUMENTS = frozenset(TrackingConfig._fields) - {"options", "given"}
# Those that may be empty. Not a role's name: without it, its job would open a run of its own.
_MAY_BE_EMPTY = {"config", *(name for name, kind in TrackingConfig.__annotations__.items() if "None" in kind)} - {
    "role"
}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge arguments: a later layer takes precedence over an earlier one, except for values that are not given.

    The run's `config` is merged key by key.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if not is_given(value):
                continue
            earlier = result.get(name)
            are_configs = name == "config" and isinstance(value, Mapping) and isinstance(earlier, Mapping)
            result[name] = {**earlier, **value} if are_configs and earlier else value
    return result


def _tags(value: Any) -> Any:
    """Return tags without empty ones; None if there are no others. W&B takes a string too, and MLflow a mapping."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        value = [f"{key}={text}" for key, text in value.items()]
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        return value
    tags = tuple(value)
    given = tuple(filter(is_given, tags))
    return given or (None if tags else ())


def own_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what this library has put into a config, which may be another program's."""
    values = config.get(OWN)
    return values if isinstance(values, Mapping) else {}


def _check_primary_rank(value: object) -> None:
    if callable(value) or (isinstance(value, int) and not isinstance(value, bool)):
        return
    raise ConfigError(
        f"primary_rank must be an int such as 0, or -1 for the last rank; or a callable that takes a DistributedInfo "
        f"and returns such an int; got {value!r}"
    )


def _check_role(name: str) -> None:
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]{0,63}", name):
        text = "must be at most 64 letters, digits, '-' and '_', beginning with a letter"
        raise ConfigError(f"the name of a role {text}; got {name!r}")
    if name in _NOT_ROLES:
        raise ConfigError(f"the name {name!r} of a role is taken: the run has keys of that name. Use another one")


def _check_secret(secret: object) -> None:
    """Refuse what is not a source of a key, without showing the value: it may be the key."""
    if secret is None or callable(secret) or (hasattr(secret, "group") and hasattr(secret, "key")):
        return
    raise ConfigError(
        f"secret must be a flytekit Secret or a callable that returns the key, got a {type(secret).__name__}: "
        "a key in the source would be pickled and registered with the task"
    )


def roles_error(run: str, roles: str) -> ConfigError:
    """Return what to raise in a job without a role that would write to a run with roles."""
    text = "a job without a role would mix its rows with theirs: pass role='...' to join it, or another id"
    return ConfigError(f"{run} has roles ({roles}), and {text}")
