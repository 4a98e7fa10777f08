"""Sweeps of W&B, which are searches over parameters.

`tracking_sweep` creates one when a function is called. W&B's own agents run its trials.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._flyte.target import Decorator
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig
from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import Task
from flyteplugins_tracking._runs.opening import may_prompt, require
from flyteplugins_tracking._util.checks import check_arguments, check_text, check_texts, is_given
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.proc import variables
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking._util.threads import call_within
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.config import TrackingConfig, merged
from flyteplugins_tracking.trackers.registry import check_config, find_tracker

F = TypeVar("F", bound=Callable[..., Any])

_LOCATION = ("project", "entity", "host")
# https://docs.wandb.ai/models/sweeps/sweep-config-keys, and the keys that the client itself reads.
_KEYS = frozenset(
    {
        *("method", "metric", "parameters", "name", "description", "program", "command", "run_cap"),
        *("early_terminate", "controller", "scheduler", "job", "image_uri"),
    }
)
_ARGUMENTS = _KEYS | {*_LOCATION, "prior_runs"}
# `compat.wandb` propagates `download_logs` too.
_PROPAGATED = _ARGUMENTS | {"download_logs"}
# The variables that `wandb.sweep` and `wandb.agent` leave changed, and the settings that W&B reads from them.
_CHANGED = {"WANDB_PROJECT": "project", "WANDB_ENTITY": "entity", "WANDB_BASE_URL": "base_url", "WANDB_DIR": None}


def tracking_sweep_config(
    *,
    method: str | None = None,
    metric: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    project: str | None = None,
    entity: str | None = None,
    prior_runs: Iterable[str] | None = None,
    name: str | None = None,
    **options: Any,
) -> PropagatedConfig:
    """Propagate the configuration of sweeps. The arguments of the decorator `tracking_sweep` take precedence.

    Like `tracking_config` it returns a context manager and mapping, with the one key `FLYTE_TRACKING_SWEEP`.

    Args:
        method: How the parameters of a trial are chosen: "grid", "random", "bayes", or "custom" for a local controller.
        metric: The metric to optimise, as `{"name": "loss", "goal": "minimize"}`.
        parameters: The search range of each parameter: `{"lr": {"min": 1e-5, "max": 1e-2}}`.
        project: The project of the sweep and of its runs.
        entity: The team or user that owns the sweep.
        prior_runs: The ids of runs that count as trials of the sweep.
        name: The sweep's name; None for `{run_name}-{action_name}` in a Flyte task.
        **options: The other keys of W&B's sweep configuration, such as `early_terminate` and `run_cap`.

    Raises:
        ConfigError: An argument is invalid, or JSON cannot hold it.
    """
    arguments = {name: value for name, value in locals().items() if name != "options"}
    value = _checked("tracking_sweep_config", {**arguments, **options})
    return PropagatedConfig(propagation.SWEEP, value, "tracking_sweep_config")


@overload
def tracking_sweep(function: F, /) -> F: ...


@overload
def tracking_sweep(
    *,
    project: str | None = None,
    entity: str | None = None,
    host: str | None = None,
    **options: Any,
) -> Callable[[F], F]: ...


def tracking_sweep(function: Any = None, /, **options: Any) -> Any:
    """Create a W&B sweep when a function is called, for the function and the tasks that it calls.

    It works on the same functions and tasks as `tracking_init`, above or below it. In the function `get_sweep_id()`
    returns the sweep's id, and `wandb.agent(get_sweep_id(), function=objective)` runs its trials. If the caller already
    has a sweep, the function uses that one. In a distributed job only rank 0 creates and has it. The service must be
    available, with an API key that each trial can read: in WANDB_API_KEY or from `wandb login`.

    Args:
        function: The function or task, if the decorator is used without arguments.
        project: The project of the sweep and of its runs.
        entity: The team or user that owns the sweep.
        host: The address of a server.
        **options: The other arguments of `tracking_sweep_config`. The decorator's arguments take precedence over that
            configuration, which takes precedence over the project, entity and host of `tracking_config`.

    Raises:
        ConfigError: At decoration: an argument is invalid, or the object cannot be decorated. At the call: the sweep
            has no method or no parameters.
        TrackerUnavailableError: At the call: the service cannot be reached, or has no valid API key.
        TrackerNotInstalledError: At the call: wandb is missing.
    """
    arguments = _checked("tracking_sweep", options)
    decorator = Decorator("tracking_sweep", links=(SweepLink(_location(arguments)),))

    def decorate(target: Any) -> Any:
        return flyte_context.adapt(target, functools.partial(_wrap, arguments), decorator)

    return decorate if function is None else decorate(function)


def get_sweep_id() -> str | None:
    """Return the id of the current sweep, or None.

    It is the sweep of the `tracking_sweep` function that is running, even in threads and in the tasks that it calls;
    otherwise the sweep of the W&B agent that runs this trial.

    Raises:
        ConfigError: The propagated sweep is malformed.
    """
    return flyte_context.propagated(propagation.SWEEP_ID).get("id") or os.environ.get("WANDB_SWEEP_ID")


def get_sweep_parameters() -> dict[str, Any]:
    """Return the parameters of the trial that this process runs, on each rank of it.

    The dict is empty outside a trial.
    """
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not path:
        return {}
    yaml: Any = importlib.import_module("yaml")  # which W&B's client needs
    with open(path) as file:
        parameters = yaml.safe_load(file) or {}
    return {name: value["value"] for name, value in parameters.items() if name != "wandb_version"}


@dataclass(frozen=True)
class SweepLink:
    """A link of a Flyte 2 task to its sweep's page: a `flyte.Link`.

    Attributes:
        location: The decorator's project, entity and host, and the id of an existing sweep.
        name: The link's name in the console.
        icon_uri: The address of an icon.
    """

    location: Mapping[str, str]
    name: str = "Weights & Biases sweep"
    icon_uri: str = ""

    def get_link(self, *, context: Mapping[str, str], **_: Any) -> str:
        """Return the address of the sweep's page, or of the project's sweeps before the sweep is created.

        Nothing is raised.
        """
        custom_context = context or {}
        try:
            keys = (propagation.CONFIG, propagation.SWEEP)
            layers = [_location(propagation.parse(custom_context.get(key), key)) for key in keys]
            sweep = propagation.parse(custom_context.get(propagation.SWEEP_ID), propagation.SWEEP_ID)
            config = TrackingConfig.from_arguments(
                merged(*layers, _location(self.location), _location({} if "id" in self.location else sweep))
            )
        except ConfigError:  # the task itself will raise it
            config, sweep = TrackingConfig.from_arguments(_location(self.location)), {}
        address = find_tracker("wandb").page(config, None) or ""
        if not config.project or not config.options.get("entity"):
            return address
        return "/".join([address, "sweeps", *filter(None, [self.location.get("id") or sweep.get("id")])])


def _checked(owner: str, options: Mapping[str, Any], allowed: Collection[str] = _ARGUMENTS) -> dict[str, Any]:
    """Return the `options` that are given, as plain values. W&B checks the search itself, when the sweep is created.

    Raises:
        ConfigError: One of them is invalid.
    """
    arguments = {name: value for name, value in options.items() if is_given(value)}
    check_arguments(owner, arguments, allowed)
    check_config(TrackingConfig.from_arguments(_location(arguments)))
    check_text("entity", arguments.get("entity"))
    if "prior_runs" in arguments:
        arguments["prior_runs"] = check_texts("prior_runs", arguments["prior_runs"])
    return plain_config(arguments, owner)


def _location(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _LOCATION if options.get(name) is not None}


def _wrap(arguments: Mapping[str, Any], function: Callable[..., Any], _: Task | None) -> Callable[..., Any]:
    """Return a real function, as `tracking_init` does."""
    if flyte_context.is_async(function):

        @functools.wraps(function)
        async def swept_async(*args: Any, **kwargs: Any) -> Any:
            with _in_sweep(arguments):
                return await function(*args, **kwargs)

        return swept_async

    @functools.wraps(function)
    def swept(*args: Any, **kwargs: Any) -> Any:
        with _in_sweep(arguments):
            return function(*args, **kwargs)

    return swept


@contextmanager
def _in_sweep(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Propagate the sweep of one call: the caller's sweep, or a new one of rank 0."""
    sweep, info = flyte_context.propagated(propagation.SWEEP_ID), get_distributed_info()
    if not sweep and info is not None and info.rank != 0:
        _configuration(arguments, flyte_context.current_context().propagated)  # fails here if it fails on rank 0
        yield
        return
    with _restored_session() as settings:
        sweep = sweep or _new_sweep(arguments)
        # For `wandb.agent(get_sweep_id(), ...)`, which reads the settings again before and in each trial.
        for name in ("project", "entity"):
            if sweep.get(name):
                os.environ[f"WANDB_{name.upper()}"] = sweep[name]
                setattr(settings, name, sweep[name])
        with flyte2.propagate({propagation.SWEEP_ID: propagation.write(sweep, "the sweep")}):
            yield


@contextmanager
def _restored_session() -> Iterator[Any]:
    """Yield the settings of W&B's session. At the end, restore these and the variables that W&B's sweeps change.

    Raises:
        TrackerNotInstalledError: wandb is missing.
    """
    require(find_tracker("wandb"))
    from flyteplugins_tracking.trackers.wandb.vendor import session

    before = session().settings
    changed = {name: getattr(before, name) for name in _CHANGED.values() if name is not None}
    try:
        with variables({name: os.environ.get(name) for name in _CHANGED}):
            yield before
    finally:
        after = session().settings  # a teardown makes new ones
        for name, value in changed.items():
            setattr(after, name, value)


def _new_sweep(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Create a sweep and return its id, project and entity."""
    context = flyte_context.current_context()
    configuration = _configuration(arguments, context.propagated)
    if context.base_id is not None:
        configuration.setdefault("name", context.base_id)
    host = None if os.environ.get("WANDB_BASE_URL") else configuration.get("host")
    _log_in(host, may_prompt(get_distributed_info(), context))
    timeout_s = TrackingConfig.from_arguments({}).with_defaults(context.propagated).init_timeout_s
    try:
        # W&B's client itself retries for minutes if a server does not answer.
        return call_within(timeout_s, _create, configuration)
    except TimeoutError:
        error: Exception = TimeoutError(f"no answer in {timeout_s:g} s")
    except Exception as refusal:
        error = refusal
    raise TrackerUnavailableError(
        f"W&B did not create the sweep: {first_line(error)}. Check the sweep's configuration, WANDB_BASE_URL, the "
        "API key and the network."
    ) from error


def _configuration(arguments: Mapping[str, Any], tracking_arguments: Mapping[str, Any]) -> dict[str, Any]:
    propagated = _checked("tracking_sweep_config", flyte_context.propagated(propagation.SWEEP), _PROPAGATED)
    configuration = merged(_location(tracking_arguments), propagated, arguments)
    missing = [f"{name}=" for name in ("method", "parameters") if not configuration.get(name)]
    if missing:
        raise ConfigError(
            f"the sweep has no {' and no '.join(missing)}: pass them to tracking_sweep, or call this in "
            "`with tracking_sweep_config(method=..., parameters=...):`"
        )
    return configuration


def _create(configuration: Mapping[str, Any]) -> dict[str, Any]:
    import wandb

    from flyteplugins_tracking.trackers.wandb.vendor import disable_error_reports

    sweep_config = {name: value for name, value in configuration.items() if name in _KEYS}
    location = {name: configuration.get(name) for name in ("project", "entity")}
    disable_error_reports()
    sweep_id = wandb.sweep(sweep_config, **location, prior_runs=configuration.get("prior_runs"))
    # `wandb.sweep` sets the variables to the project and entity that the server chose.
    actual_location = {name: os.environ.get(f"WANDB_{name.upper()}") or location[name] for name in location}
    return {"id": sweep_id, **{name: value for name, value in actual_location.items() if value}}


def _log_in(host: str | None, may_ask: bool) -> None:
    """Make sure that W&B has an API key, so that it does not prompt on a rank, and set the session's server to `host`.

    Raises:
        TrackerUnavailableError: There is no API key.
    """
    import wandb

    from flyteplugins_tracking.trackers.wandb.names import api_of
    from flyteplugins_tracking.trackers.wandb.vendor import drop_unusable_service, has_credentials, session

    drop_unusable_service()
    settings = session().settings
    server = None if host is None else api_of(host)
    if server is not None:
        settings.base_url = os.environ["WANDB_BASE_URL"] = server
    try:
        if has_credentials(settings.base_url):
            return
    except Exception as error:  # its text may hold the key
        raise TrackerUnavailableError(f"W&B does not accept the API key: {type(error).__name__}") from None
    if not may_ask:
        raise TrackerUnavailableError(
            "W&B: there is no API key for this process, and a sweep needs one. Run `wandb login`, or set WANDB_API_KEY"
        )
    wandb.login()
