"""Sweeps of W&B, which are searches over parameters.

`tracking_sweep` creates one when a function is called, and `sweep_agent` runs its trials on every rank of a job.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, overload

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._flyte import flyte2
from flyteplugins_tracking._flyte.tracking_config import PropagatedConfig
from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.call import detached, exit_code_of
from flyteplugins_tracking._runs.context import Task
from flyteplugins_tracking._runs.request import may_prompt
from flyteplugins_tracking._runs.run import require
from flyteplugins_tracking._util.checks import check_arguments, check_text, check_texts, is_given
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import initialised_distributed
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking._util.proc import TERMINATED, set_variables
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking._util.threads import call_within
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.config import TrackingConfig, merged
from flyteplugins_tracking.trackers.registry import check_config, find_tracker

logger = logging.getLogger(__name__)

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
# The variables of a trial that the other ranks need for their runs: the base of the ids, the project and the entity.
_TRIAL_VARIABLES = ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_ENTITY")
# The parameters that rank 0 sent for the current trial; None on rank 0 and outside a trial.
_received_parameters: dict[str, Any] | None = None


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
    returns the sweep's id, and `sweep_agent(objective)` or W&B's own `wandb.agent` runs its trials. If the caller
    already has a sweep, the function uses that one. In a distributed job only rank 0 creates and has it. The service
    must be available, with an API key that each trial can read: in WANDB_API_KEY or from `wandb login`.

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
    decorator = flyte_context.Decorator("tracking_sweep", links=(SweepLink(_location(arguments)),))

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
    """Propagate the sweep of one call: the caller's sweep, or a new one."""
    with restored_session():
        sweep = flyte_context.propagated(propagation.SWEEP_ID) or _new_sweep(arguments)
        if not sweep:
            yield
            return
        # For `wandb.agent(get_sweep_id(), ...)`, which reads the settings again before and in each trial.
        settings = _client_settings()
        for name in ("project", "entity"):
            if sweep.get(name):
                os.environ[f"WANDB_{name.upper()}"] = sweep[name]
                setattr(settings, name, sweep[name])
        with flyte2.propagate({propagation.SWEEP_ID: propagation.write(sweep, "the sweep")}):
            yield


def _new_sweep(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Create a sweep and return its id, project and entity; empty on ranks other than 0."""
    context, info = flyte_context.current_context(), get_distributed_info()
    configuration = _configuration(arguments, context.propagated)
    if info is not None and info.rank != 0:
        return {}
    if context.base_id is not None:
        configuration.setdefault("name", context.base_id)
    host = configuration.get("host")
    log_in(None if host is None or os.environ.get("WANDB_BASE_URL") else host, may_prompt(info, context))
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

    from flyteplugins_tracking.trackers.wandb.vendor import without_error_reports

    sweep_config = {name: value for name, value in configuration.items() if name in _KEYS}
    location = {name: configuration.get(name) for name in ("project", "entity")}
    with without_error_reports():
        sweep_id = wandb.sweep(sweep_config, **location, prior_runs=configuration.get("prior_runs"))
    # `wandb.sweep` sets the variables to the project and entity that the server chose.
    actual_location = {name: os.environ.get(f"WANDB_{name.upper()}") or location[name] for name in location}
    return {"id": sweep_id, **{name: value for name, value in actual_location.items() if value}}


def log_in(host: str | None, may_ask: bool) -> None:
    """Make sure that W&B has an API key, so that it does not prompt on a rank, and set the session's server to `host`.

    Raises:
        TrackerUnavailableError: There is no API key.
        TrackerNotInstalledError: wandb is missing.
    """
    from flyteplugins_tracking.trackers.wandb import api_of
    from flyteplugins_tracking.trackers.wandb.vendor import drop_unusable_service, has_credentials

    require(find_tracker("wandb"))
    import wandb

    drop_unusable_service()
    settings = _client_settings()
    with _blocks.lock:
        _blocks.saved[1].update({**_changed_settings(), **_blocks.saved[1]})
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


class _Blocks(PerProcess):
    """The blocks of `restored_session` that are open in any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.saved: tuple[dict[str, str | None], dict[str, Any]] = ({}, {})  # variables and settings before the first

    def after_fork_in_child(self) -> None:
        self.lock = threading.Lock()  # the child is in the same blocks


_blocks = register(_Blocks())


@contextmanager
def restored_session() -> Iterator[None]:
    """Restore the variables and settings that W&B's sweeps change, when the last open block ends."""
    with _blocks.lock:
        if not _blocks.count:
            _blocks.saved = ({name: os.environ.get(name) for name in _CHANGED}, _changed_settings())
        _blocks.count += 1
    try:
        yield
    finally:
        with _blocks.lock:
            _blocks.count -= 1
            if not _blocks.count:
                variables, settings = _blocks.saved
                set_variables(variables)
                from_variables = {name: os.environ.get(f"WANDB_{name.upper()}") for name in ("project", "entity")}
                for name, value in (settings or from_variables).items():
                    setattr(_client_settings(), name, value)


def _changed_settings() -> dict[str, Any]:
    """Return the session's settings that a sweep changes; empty if wandb is not loaded in this process."""
    names = [name for name in _CHANGED.values() if name is not None]
    return {name: getattr(_client_settings(), name) for name in names if "wandb" in sys.modules}


def _client_settings() -> Any:
    """Return the settings of W&B's session; an object without effect if wandb is not loaded in this process."""
    if "wandb" not in sys.modules:
        return SimpleNamespace()
    from flyteplugins_tracking.trackers.wandb import vendor

    return vendor.session().settings


# The trials


def sweep_agent(objective: Callable[[], Any], *, count: int | None = None, sweep_id: str | None = None) -> None:
    """Run trials of a sweep on every rank. Like `wandb.agent`, even in a distributed job.

    Only rank 0 has the agent, which calls the objective in a thread. The other ranks call it for the same trials, in
    step, and return when the agent has ended. A trial fails if the objective raises on any rank. If a rank raises while
    others wait for it in a collective, those wait until the process group's timeout: pass a short one to
    `init_process_group`.

    Args:
        objective: Called without arguments. In it `get_sweep_parameters()` returns the trial's parameters on each rank.
            If it is decorated with `tracking_init`, it has the trial's run.
        count: How many trials to run; None for all trials of the sweep.
        sweep_id: The sweep's id or `entity/project/id`; None for the sweep of the enclosing `tracking_sweep`. Only the
            argument of rank 0 is used.

    Raises:
        ConfigError: There is no sweep, several ranks have no process group, or the objective is async.
        TrackerUnavailableError: The service has no API key.
        TrackerNotInstalledError: wandb is missing.
    """
    if flyte_context.is_async(objective):
        raise ConfigError("the objective of sweep_agent must be a plain function: write `def`, not `async def`")
    info = get_distributed_info()
    if info is None or info.world_size == 1:
        _run_agent(objective, count, sweep_id)
        return
    with _group_of_ranks() as group:
        if initialised_distributed().get_rank() == 0:
            _lead(group, objective, count, sweep_id)
        else:
            _follow(group, objective)


def get_sweep_parameters() -> dict[str, Any]:
    """Return the parameters of the trial that runs in this process, on every rank of `sweep_agent`.

    The dict is empty outside a trial.
    """
    if _received_parameters is not None:
        return dict(_received_parameters)
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not path:
        return {}
    yaml: Any = importlib.import_module("yaml")  # which W&B's client needs
    with open(path) as file:
        parameters = yaml.safe_load(file) or {}
    return {name: value["value"] for name, value in parameters.items() if name != "wandb_version"}


def _run_agent(function: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    sweep = flyte_context.propagated(propagation.SWEEP_ID)
    if sweep_id is not None and sweep_id != sweep.get("id"):
        sweep = {"id": sweep_id}
    if not sweep.get("id"):
        raise ConfigError("sweep_agent has no sweep: pass sweep_id=..., or call it in a tracking_sweep function")
    with restored_session():
        log_in(None, may_prompt(get_distributed_info(), flyte_context.current_context()))
        import wandb

        wandb.agent(
            sweep["id"], function=function, entity=sweep.get("entity"), project=sweep.get("project"), count=count
        )


def _lead(group: Any, objective: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    cuda = sys.modules["torch"].cuda
    device = cuda.current_device() if cuda.is_initialized() else None

    def trial() -> None:
        if device is not None:  # the agent's thread starts with device 0
            cuda.set_device(device)
        variables = {name: os.environ[name] for name in _TRIAL_VARIABLES if name in os.environ}
        _broadcast(group, (variables, get_sweep_parameters()))
        try:
            objective()
        except BaseException as error:
            _gather_errors(group, error)
            raise
        failures = [f"rank {rank}: {failure}" for rank, failure in enumerate(_gather_errors(group, None)) if failure]
        if failures:
            _fail_run()
            raise RuntimeError("the objective failed on " + "; ".join(failures))

    try:
        _run_agent(trial, count, sweep_id)
    finally:
        _broadcast(group, None)


def _follow(group: Any, objective: Callable[[], Any]) -> None:
    """Call the objective with the parameters and variables of each trial of rank 0, until its agent has ended."""
    global _received_parameters
    while True:
        trial = _broadcast(group)
        if trial is None:
            return
        variables, _received_parameters = trial
        put_back, error = set_variables(variables), None
        try:
            with detached():
                objective()
        except (Exception, SystemExit) as raised:
            if isinstance(raised, SystemExit) and exit_code_of(raised) == TERMINATED:
                raise
            error = raised
            logger.error("the objective failed in trial %s", variables["WANDB_RUN_ID"], exc_info=True)
        finally:
            _received_parameters = None
            put_back()
        _gather_errors(group, error)


def _fail_run() -> None:
    """Finish the trial's run as failed. The objective may have finished it with rank 0's status."""
    import wandb

    from flyteplugins_tracking.trackers.wandb.vendor import is_finished

    run = wandb.run
    if run is not None and run.id == os.environ["WANDB_RUN_ID"] and not is_finished(run):
        return  # the agent finishes it
    wandb.init(resume="allow", reinit="create_new").finish(exit_code=1)


@contextmanager
def _group_of_ranks() -> Iterator[Any]:
    """Make a separate process group of all ranks, so that its collectives do not mix with the objective's.

    Raises:
        ConfigError: torch's default process group is not initialised.
    """
    dist = initialised_distributed()
    if dist is None:
        raise ConfigError(
            "sweep_agent with several ranks needs a process group: call torch.distributed.init_process_group first"
        )
    # gloo even beside NCCL: the agent's thread must not use a CUDA device. A sweep may have no trial for hours.
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    try:
        yield group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(group)


def _broadcast(group: Any, message: Any = None) -> Any:
    """Return rank 0's message, on each rank."""
    messages = [message]
    sys.modules["torch.distributed"].broadcast_object_list(messages, src=0, group=group)
    return messages[0]


def _gather_errors(group: Any, error: BaseException | None) -> list[str | None]:
    """Return the trial's error on each rank, or None for success, when the trial has ended on all ranks."""
    dist = sys.modules["torch.distributed"]
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}", group=group)
    return errors
