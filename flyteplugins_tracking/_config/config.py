"""The user's configuration: `TrackingConfig`, checked when the decorator is applied."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
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
from flyteplugins_tracking._util.checks import check_choice, check_flag, check_seconds, check_text, check_texts
from flyteplugins_tracking.errors import ConfigError

IfUnavailable = Literal["raise", "degrade"]
"""Whether to raise an error or to degrade if the service cannot be used when a run is opened."""

Rollback = Literal["keep", "rewind"]
"""How a run takes the rows that a job logs again after it has gone back to its checkpoint."""

# The last seconds before the launcher's SIGKILL, in which a process whose run has ended comes to its own end.
_END_S = 5.0


@dataclass(frozen=True)
class TrackingConfig:
    """The arguments of one `tracking_init`.

    Attributes:
        tracker: The tracker's name, or a `Tracker`.
        run_mode: Which ranks of the scope have a run: as for `flyteplugins_tracking.plan`.
        rank_scope: Whether the scope is the job or the worker: as for `flyteplugins_tracking.plan`.
        primary_rank: The scope's primary, or a callable that returns it: as for `flyteplugins_tracking.plan`. In the
            config that a tracker gets, it is the primary's number in its scope, from 0.
        id: The base id; None if the ranks shall agree on one.
        project: The project of the runs; None for the tracker's default.
        group: The group of the runs; None for the plan's.
        name: The run's name; None for the tracker's choice.
        tags: The run's tags.
        notes: The run's notes.
        config: The run's config as plain JSON values, or the path of a file that the tracker reads.
        secret: Returns the API key, inside the worker.
        if_unavailable: Whether to raise or to degrade if the service or its API key is missing when the run is opened.
        init_timeout_s: Seconds that opening may take.
        kill_after_s: Seconds that the launcher gives between SIGTERM and SIGKILL.
        hang_timeout_s: Seconds without a row or a heartbeat after which the ranks' stacks are reported; None for never.
        pulse_s: Seconds between two pulses of a rank, which the primary logs; None for none.
        stop_before_s: Seconds before the launcher's time limit at which such a loop is asked to stop; None for never.
        rank_prefix: Whether the keys that a rank logs to a shared run get the prefix `rank_{rank}/`.
        step_metric: The column that `step=` becomes in a shared run, and after a rollback.
        rollback: Whether the service keeps or drops the rows that a job logs again after a restart.
        download_logs: Whether the run's files become an output of its Flyte task.
        options: The arguments that only this tracker has, passed through.
        given: The names of the fields above that the user set, without `options`; the others have their defaults.
    """

    tracker: Any = "wandb"
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    primary_rank: PrimaryRank = 0
    id: str | None = None
    project: str | None = None
    group: str | None = None
    name: str | None = None
    tags: Sequence[str] | None = None
    notes: str | None = None
    config: Mapping[str, Any] | str = field(default_factory=dict)
    secret: Any = field(default=None, repr=False)
    if_unavailable: IfUnavailable = "raise"
    init_timeout_s: float = 30.0
    kill_after_s: float = 30.0
    hang_timeout_s: float | None = None
    pulse_s: float | None = None
    stop_before_s: float | None = None
    rank_prefix: bool = False
    step_metric: str = "global_step"
    rollback: Rollback = "keep"
    download_logs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    given: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        check_choice("run_mode", self.run_mode, RUN_MODES)
        check_choice("rank_scope", self.rank_scope, RANK_SCOPES)
        _check_primary_rank(self.primary_rank)
        check_choice("if_unavailable", self.if_unavailable, get_args(IfUnavailable))
        check_choice("rollback", self.rollback, get_args(Rollback))
        check_seconds("init_timeout_s", self.init_timeout_s)
        check_seconds("kill_after_s", self.kill_after_s)
        for name in ("hang_timeout_s", "pulse_s", "stop_before_s"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))
        for name in ("rank_prefix", "download_logs"):
            check_flag(name, getattr(self, name))
        for name in ("id", "project", "group", "name", "notes"):
            check_text(name, getattr(self, name))
        if self.step_metric is None:
            raise ConfigError("step_metric must be a non-empty string, got None")
        check_text("step_metric", self.step_metric)
        _check_secret(self.secret)
        object.__setattr__(self, "tags", check_texts("tags", self.tags))
        if not isinstance(self.config, str):
            object.__setattr__(self, "config", plain_config(self.config))

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TrackingConfig:
        """Return the config of these arguments by name; those that are not fields become `options`.

        Raises:
            ConfigError: The value of a field is invalid.
        """
        field_values = {name: value for name, value in arguments.items() if name in OWN_ARGUMENTS}
        options = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
        return cls(**field_values, options=options, given=frozenset(field_values))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments from which `from_arguments` makes an equal config."""
        return {**self.options, **{name: getattr(self, name) for name in self.given}}

    @property
    def finish_timeout_s(self) -> float:
        """Seconds that finishing may take, and that a loop with `should_stop()` may go on after SIGTERM.

        `kill_after_s` less 5 s, in which the process ends; less half of it, if that is shorter than 5 s.
        """
        return self.kill_after_s - min(_END_S, self.kill_after_s / 2)

    @property
    def finish_limit(self) -> str:
        """`finish_timeout_s` in messages."""
        return f"{self.finish_timeout_s:g} s (kill_after_s={self.kill_after_s:g})"

    @property
    def is_monitored(self) -> bool:
        """Whether a thread of each rank looks at the job's ranks while the function runs."""
        return self.hang_timeout_s is not None or self.pulse_s is not None

    def with_defaults(self, propagated: Mapping[str, Any]) -> TrackingConfig:
        """Return this config, with the `propagated` arguments for those that it does not set.

        Raises:
            ConfigError: As `from_arguments`.
        """
        return TrackingConfig.from_arguments(merged(propagated, self.arguments)) if propagated else self

    def with_overrides(self, arguments: Mapping[str, Any]) -> TrackingConfig:
        """Return this config, with `arguments` in place of its own.

        Raises:
            ConfigError: As `from_arguments`.
        """
        return TrackingConfig.from_arguments(merged(self.arguments, arguments))

    def for_parent(self, parent: Mapping[str, Any]) -> TrackingConfig:
        """Return this config for the run of a calling task: at that run's place, and with that run's `config`.

        Raises:
            ConfigError: As `from_arguments`.
        """
        overrides = {name: value for name, value in parent.items() if name != "id"}
        return replace(self, config={}).with_overrides(overrides)

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
OWN_ARGUMENTS = frozenset(config_field.name for config_field in fields(TrackingConfig)) - {"options", "given"}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge arguments: a later layer takes precedence over an earlier one, except for values that are None.

    The run's `config` is merged key by key.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            earlier = result.get(name)
            are_configs = name == "config" and isinstance(value, Mapping) and isinstance(earlier, Mapping)
            result[name] = {**earlier, **value} if are_configs and earlier else value
    return result


def plain_config(config: object, name: str = "config") -> dict[str, Any]:
    """Return a copy of `config` as plain JSON values.

    It may be a mapping, a dataclass or a namespace. Its values may also be NumPy and torch scalars and arrays, paths
    and enums.

    Raises:
        ConfigError: JSON cannot hold a value; the message has its key.
    """
    if config is None:
        return {}
    if is_dataclass(config) and not isinstance(config, type):  # first, since a dataclass may also be a mapping
        config = asdict(config)
    elif not isinstance(config, Mapping) and hasattr(config, "__dict__") and not callable(config):
        config = vars(config)  # argparse.Namespace, types.SimpleNamespace
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name} must be a mapping, a dataclass or a namespace, got {type(config).__name__}")
    plain: dict[str, Any] = _plain(config, name, ())
    return plain


def _plain(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if id(value) in parents:
        raise ConfigError(f"{path} contains itself: JSON cannot hold it")
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        return {_plain_key(key, path): _plain(v, f"{path}[{key!r}]", parents) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]", parents) for i, v in enumerate(value)]
    return _plain_object(value, path, parents)


def _plain_key(key: Any, path: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, float, bool)):
        return json.dumps(key)
    raise ConfigError(f"{path} has the key {key!r} of type {type(key).__name__}: JSON keys must be text")


def _plain_object(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, path, parents)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value), path, parents)
    if callable(getattr(value, "tolist", None)):  # NumPy and torch, scalars and arrays
        return _plain(value.tolist(), path, parents)
    if isinstance(value, (int, float)):  # a subclass
        return float(value) if isinstance(value, float) else int(value)
    raise ConfigError(
        f"{path} is a {type(value).__name__}: JSON cannot hold it. Pass text, numbers, lists or mappings."
    )


def _check_primary_rank(value: object) -> None:
    if callable(value) or (isinstance(value, int) and not isinstance(value, bool)):
        return
    raise ConfigError(
        f"primary_rank must be an int such as 0, or -1 for the last rank; or a callable that takes a DistributedInfo "
        f"and returns such an int; got {value!r}"
    )


def _check_secret(secret: object) -> None:
    """Refuse what is not a source of a key, without showing the value: it may be the key."""
    if secret is None or callable(secret) or (hasattr(secret, "group") and hasattr(secret, "key")):
        return
    raise ConfigError(
        f"secret must be a flytekit Secret or a callable that returns the key, got a {type(secret).__name__}: "
        "a key in the source would be pickled and registered with the task"
    )
