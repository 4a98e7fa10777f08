"""`tracking_sweep`: makes a sweep, W&B's search over parameters, where a function is called."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._config.config import TrackingConfig, merged, plain_config
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig
from flyteplugins_tracking._job.plan import NodeRequest
from flyteplugins_tracking._job.topology import get_distributed_info
from flyteplugins_tracking._runs.calls import Task
from flyteplugins_tracking._runs.open import may_prompt, require
from flyteplugins_tracking._util.checks import check_arguments, check_choice, check_text, check_texts
from flyteplugins_tracking._util.timeout import run_with_timeout
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.registry import check_config, find_tracker

F = TypeVar("F", bound=Callable[..., Any])

METHODS = ("bayes", "custom", "grid", "random")
_PLACE = ("project", "entity", "host")
# https://docs.wandb.ai/models/sweeps/sweep-config-keys, and what the client itself looks at.
_KEYS = frozenset(
    {
        "command",
        "controller",
        "description",
        "early_terminate",
        "image_uri",
        "job",
        "method",
        "metric",
        "name",
        "parameters",
        "program",
        "run_cap",
        "scheduler",
    }
)
_ARGUMENTS = _KEYS | {*_PLACE, "prior_runs"}
# What `compat.wandb` propagates with them.
_PROPAGATED = _ARGUMENTS | {"download_logs"}
_TEXTS = ("entity", "name", "description", "program", "job", "image_uri")
_MAPPINGS = ("metric", "parameters", "early_terminate", "controller", "scheduler")
# What `wandb.sweep` and `wandb.agent` leave set for what comes after them, and the settings that are read from it.
_LEFT = {"WANDB_PROJECT": "project", "WANDB_ENTITY": "entity", "WANDB_BASE_URL": "base_url", "WANDB_DIR": None}


def tracking_sweep_config(
    *,
    method: str | None = None,
    metric: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    project: str | None = None,
    entity: str | None = None,
    prior_runs: Iterable[str] | None = None,
    name: str | None = None,
    **more: Any,
) -> PropagatedConfig:
    """The configuration of the sweeps of what is called, where the decorator `tracking_sweep` says nothing.

    A context manager and a mapping, as `tracking_config` is, with the one key `FLYTE_TRACKING_SWEEP`.

    Args:
        method: How the parameters of a trial are chosen: "grid", "random", "bayes", or "custom" for a local controller.
        metric: What is optimised, as `{"name": "loss", "goal": "minimize"}`.
        parameters: By its name, how each parameter is searched: `{"lr": {"min": 1e-5, "max": 1e-2}}`.
        project: The project of the sweep and of its runs.
        entity: The team or user that it belongs to.
        prior_runs: The ids of runs that count as trials of it.
        name: The sweep's name; None for `{run_name}-{action_name}` in a task of Flyte.
        **more: The other keys of W&B's sweep configuration, such as `early_terminate` and `run_cap`.

    Raises:
        ConfigError: An argument that cannot work, or that JSON cannot hold.
    """
    named = {
        "method": method,
        "metric": metric,
        "parameters": parameters,
        "project": project,
        "entity": entity,
        "prior_runs": prior_runs,
        "name": name,
    }
    value = _checked("tracking_sweep_config", {**named, **more})
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
    """Make a W&B sweep when a function is called, and have it found in the function and by the tasks that it calls.

    Works where `tracking_init` does, above or below it. In the function `get_sweep_id()` is the sweep's id, and
    `sweep_agent(objective)` or W&B's own `wandb.agent` runs its trials. Where the caller carries a sweep, the function
    has that one. In a distributed job rank 0 alone makes and has it. The service is needed, and a key for it that each
    trial finds anew: in WANDB_API_KEY or by `wandb login`.

    Args:
        function: The function or task, where the decorator is used without arguments.
        project: The project of the sweep and of its runs.
        entity: The team or user that it belongs to.
        host: The address of a server.
        **options: The other arguments of `tracking_sweep_config`. These go before what that says, and it before the
            project, entity and host of `tracking_config`.

    Raises:
        ConfigError: At decoration: an argument that cannot work, or something that cannot be decorated. At the call:
            the sweep has no method or no parameters.
        TrackerUnavailableError: At the call: the service, or a key for it, is not there.
        TrackerNotInstalledError: At the call: wandb is missing.
    """
    given = _checked("tracking_sweep", options)
    link = SweepLink(_place(given))

    def links(workers: NodeRequest | None, task: Any) -> tuple[SweepLink]:  # noqa: ARG001
        return (link,)

    def decorate(target: Any) -> Any:
        wrap = functools.partial(_wrap, given)
        return flyte_context.adapt(target, wrap, flyte_context.Decorator("tracking_sweep", links, lambda _: {}))

    return decorate if function is None else decorate(function)


def get_sweep_id() -> str | None:
    """The id of the sweep of the `tracking_sweep` that is running, also in threads and in the tasks that it calls.

    In a trial of another agent's, it is that one's. None without either.

    Raises:
        ConfigError: What is propagated is malformed.
    """
    return flyte_context.propagated(propagation.SWEEP_ID).get("id") or os.environ.get("WANDB_SWEEP_ID")


@dataclass(frozen=True)
class SweepLink:
    """A link of a Flyte 2 task to its sweep's page: a `flyte.Link`.

    Attributes:
        place: The project, entity and host that the decorator was given; and an id, of a sweep that is there already.
        name: What the console shows.
        icon_uri: The address of an icon.
    """

    place: Mapping[str, str]
    name: str = "Weights & Biases sweep"
    icon_uri: str = ""

    def get_link(
        self,
        run_name: str,  # noqa: ARG002 flyte calls this with all of them
        project: str,  # noqa: ARG002
        domain: str,  # noqa: ARG002
        context: Mapping[str, str],
        parent_action_name: str,  # noqa: ARG002
        action_name: str,  # noqa: ARG002
        pod_name: str,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> str:
        """The page's address; before the sweep is made, that of the project's sweeps. Nothing is raised."""
        carried = context or {}
        try:
            keys = (propagation.CONFIG, propagation.SWEEP)
            layers = [_place(propagation.parse(carried.get(key), key)) for key in keys]
            sweep = propagation.parse(carried.get(propagation.SWEEP_ID), propagation.SWEEP_ID)
            config = TrackingConfig.from_arguments(
                merged(*layers, _place(self.place), _place({} if "id" in self.place else sweep))
            )
        except ConfigError:  # which the task itself will say
            config, sweep = TrackingConfig.from_arguments(_place(self.place)), {}
        address = find_tracker("wandb").page(config, None) or ""
        if not config.project or not config.options.get("entity"):
            return address
        return "/".join([address, "sweeps", *filter(None, [self.place.get("id") or sweep.get("id")])])


def _checked(owner: str, options: Mapping[str, Any], allowed: Collection[str] = _ARGUMENTS) -> dict[str, Any]:
    """The `options` that are given, as plain values.

    Raises:
        ConfigError: One of them cannot work.
    """
    given = {name: value for name, value in options.items() if value is not None}
    check_arguments(owner, given, allowed)
    check_config(TrackingConfig.from_arguments(_place(given)))
    for name in _TEXTS:
        check_text(name, given.get(name))
    for name in _MAPPINGS:
        if not isinstance(given.get(name, {}), Mapping):
            raise ConfigError(f"{name}= takes a mapping, not {type(given[name]).__name__}{_EXAMPLES.get(name, '')}")
    if "method" in given:
        check_choice("method", given["method"], METHODS)
    if "prior_runs" in given:
        given["prior_runs"] = check_texts("prior_runs", given["prior_runs"])
    _check_metric(given.get("metric", {}))
    _check_parameters(given.get("parameters", {}))
    return plain_config(given, owner)


_EXAMPLES = {
    "metric": ", as in metric={'name': 'loss', 'goal': 'minimize'}",
    "parameters": ", as in parameters={'lr': {'values': [0.1, 0.01]}}",
}


def _check_metric(metric: Mapping[str, Any]) -> None:
    if "goal" in metric:
        check_choice("the goal of metric", metric["goal"], ("maximize", "minimize"))
    if metric and "name" not in metric:
        raise ConfigError(f"metric= names no metric{_EXAMPLES['metric']}")


def _check_parameters(parameters: Mapping[str, Any]) -> None:
    for name, searched in parameters.items():
        if not isinstance(searched, Mapping):
            hint = "'values': [...]" if isinstance(searched, (list, tuple)) else f"'value': {searched!r}"
            raise ConfigError(f"the parameter {name!r} is no mapping: write {{{hint}}}")


def _place(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _PLACE if options.get(name) is not None}


def _wrap(given: Mapping[str, Any], function: Callable[..., Any], _: Task | None) -> Callable[..., Any]:
    """A real function, as `tracking_init` makes it."""
    if flyte_context.is_async(function):

        @functools.wraps(function)
        async def swept_async(*args: Any, **kwargs: Any) -> Any:
            with _sweep_of(given):
                return await function(*args, **kwargs)

        return swept_async

    @functools.wraps(function)
    def swept(*args: Any, **kwargs: Any) -> Any:
        with _sweep_of(given):
            return function(*args, **kwargs)

    return swept


@contextmanager
def _sweep_of(given: Mapping[str, Any]) -> Iterator[None]:
    """Have the sweep of one call found in its block: the one that is carried, or a new one."""
    with session_kept():
        sweep = flyte_context.propagated(propagation.SWEEP_ID) or _made(given)
        if not sweep:
            yield
            return
        # For `wandb.agent(get_sweep_id(), ...)`, before and in whose trials the settings are read anew.
        _set_place({name: sweep[name] for name in ("project", "entity") if sweep.get(name)})
        with flyte2.propagate({propagation.SWEEP_ID: propagation.write(sweep, "the sweep")}):
            yield


def _set_place(place: Mapping[str, str]) -> None:
    os.environ.update({f"WANDB_{name.upper()}": value for name, value in place.items()})
    if "wandb" in sys.modules:
        from wandb.sdk import wandb_setup

        for name, value in place.items():
            setattr(wandb_setup.singleton().settings, name, value)


def _made(given: Mapping[str, Any]) -> dict[str, Any]:
    """A new sweep's id, project and entity; empty on ranks that make none."""
    context, info = flyte_context.current_context(), get_distributed_info()
    wanted = _wanted(given, context.propagated)
    if info is not None and info.rank != 0:
        return {}
    if context.base_id is not None:
        wanted.setdefault("name", context.base_id)
    host = wanted.get("host")
    log_in(None if host is None or os.environ.get("WANDB_BASE_URL") else host, may_prompt(info, context))
    timeout_s = TrackingConfig.from_arguments({}).with_defaults(context.propagated).init_timeout_s
    return _make_with_timeout(functools.partial(_make, wanted), timeout_s)


def _wanted(given: Mapping[str, Any], tracking: Mapping[str, Any]) -> dict[str, Any]:
    propagated = _checked("tracking_sweep_config", flyte_context.propagated(propagation.SWEEP), _PROPAGATED)
    wanted = merged(_place(tracking), propagated, given)
    missing = [f"{name}=" for name in ("method", "parameters") if not wanted.get(name)]
    if missing:
        raise ConfigError(
            f"the sweep has no {' and no '.join(missing)}: pass them to tracking_sweep, or call this in "
            "`with tracking_sweep_config(method=..., parameters=...):`"
        )
    return wanted


def _make(wanted: Mapping[str, Any]) -> dict[str, Any]:
    import wandb

    from flyteplugins_tracking.trackers.wandb.vendor import without_error_reports

    configuration = {name: value for name, value in wanted.items() if name in _KEYS}
    place = {name: wanted.get(name) for name in ("project", "entity")}
    with without_error_reports():
        sweep_id = wandb.sweep(configuration, **place, prior_runs=wanted.get("prior_runs"))
    # Where the server has put it, `wandb.sweep` leaves in the variables.
    found = {name: os.environ.get(f"WANDB_{name.upper()}") or place[name] for name in place}
    return {"id": sweep_id, **{name: value for name, value in found.items() if value}}


def log_in(host: str | None, may_ask: bool) -> None:
    """Make sure that W&B finds a key rather than prompt on a rank; the session's server is `host` from here on.

    Raises:
        TrackerUnavailableError: There is no key.
        TrackerNotInstalledError: wandb is missing.
    """
    from flyteplugins_tracking.trackers.wandb.options import api_of
    from flyteplugins_tracking.trackers.wandb.vendor import drop_unusable_service, has_credentials

    require(find_tracker("wandb"))
    import wandb
    from wandb.sdk import wandb_setup

    drop_unusable_service()
    settings = wandb_setup.singleton().settings
    with _lock:
        _kept[1].update({**_settings(), **_kept[1]})
    server = None if host is None else api_of(host)
    if server is not None:
        settings.base_url = os.environ["WANDB_BASE_URL"] = server
    try:
        if has_credentials(settings.base_url):
            return
    except Exception as error:  # its text may hold the key
        raise TrackerUnavailableError(f"W&B does not take the API key: {type(error).__name__}") from None
    if not may_ask:
        raise TrackerUnavailableError(
            "W&B: there is no API key for this process, and a sweep needs one. Run `wandb login`, or set WANDB_API_KEY"
        )
    wandb.login()


def _make_with_timeout(make: Callable[[], dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    """W&B's client itself asks a mute server for minutes."""
    results: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(make())
        except Exception as error:
            errors.append(error)

    run_with_timeout(timeout_s, run)
    if results:
        return results[0]
    cause = (str(errors[0]).strip().splitlines() or [repr(errors[0])])[0] if errors else f"no answer in {timeout_s:g} s"
    raise TrackerUnavailableError(
        f"W&B has made no sweep: {cause.rstrip('.')}. Check the sweep's configuration, WANDB_BASE_URL, the API key and "
        "the network."
    ) from (errors[0] if errors else None)


# What the variables and settings were before the first of the blocks that are open, of all threads.
_kept: tuple[dict[str, str | None], dict[str, Any]] = ({}, {})
_keepers = 0
_lock = threading.Lock()


@contextmanager
def session_kept() -> Iterator[None]:
    """Undo what W&B's sweeps leave set in this process, when the last block of several at once ends."""
    global _kept, _keepers
    with _lock:
        if not _keepers:
            _kept = ({name: os.environ.get(name) for name in _LEFT}, _settings())
        _keepers += 1
    try:
        yield
    finally:
        with _lock:
            _keepers -= 1
            if not _keepers:
                _restore(*_kept)


def _restore(variables: Mapping[str, str | None], settings: Mapping[str, Any]) -> None:
    propagation.set_variables(variables)
    if "wandb" in sys.modules:
        from wandb.sdk import wandb_setup

        loaded_here = {name: os.environ.get(f"WANDB_{name.upper()}") for name in ("project", "entity")}
        for name, value in (settings or loaded_here).items():
            setattr(wandb_setup.singleton().settings, name, value)


def _settings() -> dict[str, Any]:
    """Those of the session that a sweep changes; none where wandb is still to be loaded by this process."""
    if "wandb" not in sys.modules:
        return {}
    from wandb.sdk import wandb_setup

    settings = wandb_setup.singleton().settings
    return {name: getattr(settings, name) for name in _LEFT.values() if name is not None}
