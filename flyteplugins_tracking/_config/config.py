"""What the user asked for: `TrackingConfig`, checked when the decorator is applied."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args

from flyteplugins_tracking._job.plan import RANK_SCOPES, RUN_MODES, RankScope, RunMode
from flyteplugins_tracking._util.checks import check_choice, check_flag, check_seconds, check_text, check_texts
from flyteplugins_tracking.errors import ConfigError

IfUnavailable = Literal["raise", "degrade"]
"""What happens where the service cannot be used when a run is opened."""


@dataclass(frozen=True)
class TrackingConfig:
    """The arguments of one `tracking_init`.

    Attributes:
        tracker: The tracker's name, or a `Tracker`.
        run_mode: See `flyteplugins_tracking._job.plan.plan`.
        rank_scope: See `flyteplugins_tracking._job.plan.plan`.
        id: The base id; None for one that the ranks agree on by themselves.
        project: The project of the runs; None for the tracker's own default.
        group: The group of the runs; None for the plan's.
        name: The run's name; None for the tracker's choice.
        tags: The run's tags.
        notes: The run's notes.
        config: The run's config, held as plain JSON values; or the path of a file that the tracker reads.
        secret: Gives the API key, inside the worker.
        if_unavailable: What happens when the service cannot be reached, or there is no key for it, at opening.
        init_timeout_s: Seconds that opening may take.
        finish_timeout_s: Seconds that finishing may take.
        rank_prefix: Whether the keys that a rank logs to a shared run gain its `rank_{rank}/`.
        allow_config: Whether all ranks of a shared run may change its config.
        step_metric: The column that `step=` becomes in a shared run.
        download_logs: Whether the run's files become an output of its Flyte task.
        options: The tracker's own arguments, passed through.
        given: The names of those above, but for `options`, that were asked for; the others have their defaults.
    """

    tracker: Any = "wandb"
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
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
    finish_timeout_s: float = 25.0
    rank_prefix: bool = False
    allow_config: bool = False
    step_metric: str = "global_step"
    download_logs: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    given: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        check_choice("run_mode", self.run_mode, RUN_MODES)
        check_choice("rank_scope", self.rank_scope, RANK_SCOPES)
        check_choice("if_unavailable", self.if_unavailable, get_args(IfUnavailable))
        check_seconds("init_timeout_s", self.init_timeout_s)
        check_seconds("finish_timeout_s", self.finish_timeout_s)
        for name in ("rank_prefix", "allow_config", "download_logs"):
            check_flag(name, getattr(self, name))
        for name in ("id", "project", "group", "name", "notes"):
            check_text(name, getattr(self, name))
        if self.step_metric is None:
            raise ConfigError("step_metric=None is no text")
        check_text("step_metric", self.step_metric)
        _check_secret(self.secret)
        object.__setattr__(self, "tags", check_texts("tags", self.tags))
        if not isinstance(self.config, str):
            object.__setattr__(self, "config", plain_config(self.config))

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> TrackingConfig:
        """From arguments by their names: those above, and the tracker's own.

        Raises:
            ConfigError: One of those above cannot work.
        """
        own = {name: value for name, value in arguments.items() if name in OWN_ARGUMENTS}
        options = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
        return cls(**own, options=options, given=frozenset(own))

    @property
    def arguments(self) -> dict[str, Any]:
        """What `from_arguments` makes this from."""
        return {**self.options, **{name: getattr(self, name) for name in self.given}}

    def with_defaults(self, propagated: Mapping[str, Any]) -> TrackingConfig:
        """This, with what `propagated` says where this says nothing.

        Raises:
            ConfigError: As `from_arguments`.
        """
        return TrackingConfig.from_arguments(merged(propagated, self.arguments)) if propagated else self

    def with_overrides(self, arguments: Mapping[str, Any]) -> TrackingConfig:
        """This, with `arguments` in place of what this says.

        Raises:
            ConfigError: As `from_arguments`.
        """
        return TrackingConfig.from_arguments(merged(self.arguments, arguments))

    def for_parent(self, parent: Mapping[str, Any]) -> TrackingConfig:
        """This, in the run that a calling task has passed on: where that is, and with its config for this one's.

        Raises:
            ConfigError: As `from_arguments`.
        """
        passed_on = {name: value for name, value in parent.items() if name != "id"}
        return replace(self, config={}).with_overrides(passed_on)


# What `tracking_init` takes by name.
OWN_ARGUMENTS = frozenset(one.name for one in fields(TrackingConfig)) - {"options", "given"}


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of all `layers`: a later one goes before an earlier one, but where it is None.

    The run's `config` is merged in turn, key by key.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            lower = result.get(name)
            both = name == "config" and isinstance(value, Mapping) and isinstance(lower, Mapping)
            result[name] = {**lower, **value} if both and lower else value
    return result


def plain_config(config: object, name: str = "config") -> dict[str, Any]:
    """`config` as plain JSON values: a copy, so that a later change of the original does nothing.

    Takes mappings, dataclasses and namespaces; in them also NumPy and torch scalars and arrays, paths and enums.

    Raises:
        ConfigError: JSON cannot hold it; the text says where.
    """
    if config is None:
        return {}
    if is_dataclass(config) and not isinstance(config, type):  # first: it may be a mapping too, of other things
        config = asdict(config)
    elif not isinstance(config, Mapping) and hasattr(config, "__dict__") and not callable(config):
        config = vars(config)  # argparse.Namespace, types.SimpleNamespace
    if not isinstance(config, Mapping):
        raise ConfigError(f"{name}= takes a mapping, a dataclass or a namespace, not {type(config).__name__}")
    plain: dict[str, Any] = _plain(config, name, ())
    return plain


def _plain(value: Any, where: str, parents: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if id(value) in parents:
        raise ConfigError(f"{where} contains itself: JSON cannot hold it")
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        return {_plain_key(key, where): _plain(v, f"{where}[{key!r}]", parents) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", parents) for i, v in enumerate(value)]
    return _plain_object(value, where, parents)


def _plain_key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, float, bool)):
        return json.dumps(key)
    raise ConfigError(f"{where} has the key {key!r} of type {type(key).__name__}: JSON keys are text")


def _plain_object(value: Any, where: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, where, parents)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value), where, parents)
    if callable(getattr(value, "tolist", None)):  # NumPy and torch, scalars and arrays
        return _plain(value.tolist(), where, parents)
    if isinstance(value, (int, float)):  # a subclass
        return float(value) if isinstance(value, float) else int(value)
    raise ConfigError(
        f"{where} is a {type(value).__name__}: JSON cannot hold it. Pass text, numbers, lists or mappings."
    )


def _check_secret(secret: object) -> None:
    """The value is never shown: it may be a key."""
    if secret is None or callable(secret) or (hasattr(secret, "group") and hasattr(secret, "key")):
        return
    raise ConfigError(
        f"secret= takes a flytekit Secret or a callable that returns the key, not a {type(secret).__name__}: "
        "a key in the source would be pickled and registered with the task"
    )
