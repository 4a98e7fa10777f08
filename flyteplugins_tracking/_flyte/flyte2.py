"""Flyte 2. This module never imports flyte: code that needs it runs only if the user's code has loaded it.

The function and the links of a task are changed in place. A copy, such as `override` makes, would not be in the task's
environment, and copies of the task would lack a patched `execute`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flyteplugins_tracking._flyte.target import Decorator, class_names, workers_of
from flyteplugins_tracking._rank.plan import NodeRequest, pages
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import ExecutionContext, Task
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.config import TrackingConfig, merged
from flyteplugins_tracking.trackers.registry import find_tracker, propagated_to

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Tracker

_TASK = "flyte._task.AsyncFunctionTaskTemplate"
_ANY_TASK = "flyte._task.TaskTemplate"
_ENVIRONMENT = "flyte._environment.Environment"
# The key of the counts of an attempt's calls in `TaskContext.data`, which belongs to one attempt.
_CALL_COUNTS = "flyteplugins_tracking_call_counts"


@dataclass(frozen=True)
class TrackingLink:
    """A link of a task to one of its pages: a `flyte.Link`.

    Attributes:
        name: The link's text in the console.
        config: The user's arguments, without secrets: they are pickled with the task.
        workers: The nodes that the task requests; None for a task in one process.
        index: The index of the link's page among the task's pages.
        variables: The variables that choose a run or arguments, if the task's environment sets them.
        icon_uri: The address of an icon.
    """

    name: str
    config: TrackingConfig
    workers: NodeRequest | None = None
    index: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    icon_uri: str = ""

    def get_link(self, *, run_name: str, context: Mapping[str, str], action_name: str, **_: Any) -> str:
        """Return the page's address. `action_name` may be a template of the backend. Raises nothing."""
        try:
            return self._address(f"{run_name}-{action_name}", action_name, context or {})
        except ConfigError:  # the task itself will raise it
            return find_tracker(self.config.tracker).page(self.config, None) or ""

    def _address(self, own_id: str, action_name: str, custom_context: Mapping[str, str]) -> str:
        config = propagated_to(self.config, _propagated(self.variables, custom_context, action_name))
        tracker = find_tracker(config.tracker)
        parent = _runs(custom_context).get(tracker.name) if self.workers is None and config.run_mode != "new" else None
        if parent is not None:
            config = config.for_parent(parent)
        elif config.run_mode == "shared" and self.workers is None:
            return tracker.page(config, None) or ""
        chosen = next((self.variables[name] for name in tracker.run_id_variables if self.variables.get(name)), None)
        base_id = config.id or chosen or own_id
        task_pages = pages(self.workers, config.run_mode, config.rank_scope, base_id, parent and parent["id"])
        return tracker.page(config, task_pages[min(self.index, len(task_pages) - 1)]) or ""


def is_entity(target: Any) -> bool:
    """Whether `target` is a task or an environment of Flyte 2."""
    return not class_names(target).isdisjoint({_ANY_TASK, _ENVIRONMENT})


def function_of(task: Any, advice: str) -> tuple[Callable[..., Any], NodeRequest | None]:
    """Return the function of `task`, and the nodes that it requests.

    Raises:
        ConfigError: `task` is not a Python function task. The message ends with the `advice`.
    """
    if _TASK not in class_names(task):
        raise ConfigError(f"{task.name!r} is a {type(task).__name__}: {advice}")
    return task.func, _workers(task)


def adapt_task(task: Any, workers: NodeRequest | None, wrap: Callable[[Any, Task], Any], decorator: Decorator) -> Any:
    """Put `wrap` around the function of `task`, add its links, and return the same task."""
    task.func = wrap(task.func, Task(workers is not None, _timeout_s(task)))
    run_links = _run_links(decorator.config, workers, task) if decorator.config else ()
    task.links = (*task.links, *run_links, *decorator.links)
    return task


def _timeout_s(task: Any) -> float | None:
    """Return how long an attempt of the task may run, in seconds; None for no limit.

    https://github.com/flyteorg/flyte-sdk/blob/main/src/flyte/_timeout.py
    """
    timeout = getattr(task.timeout, "max_runtime", task.timeout)  # the rest of it is about queues and all attempts
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout or 0)
    return seconds or None


def current_context() -> Flyte2Context | None:
    """Return the context of the task that runs here; None outside of a task."""
    task = task_context()
    if task is None:
        return None
    action = getattr(task, "task_action", None) or task.action
    custom_context = task.custom_context or {}
    on_cluster = task.mode == "remote"
    return Flyte2Context(
        base_id=f"{action.run_name}-{action.name}",
        label=action.name,
        propagated=_propagated(None, custom_context, action.name),
        parents=_runs(custom_context),
        # In local mode, child tasks run in this process, and join the run as functions do.
        has_children=task.mode != "local",
        call_counts=task.data.setdefault(_CALL_COUNTS, Counter()),
        can_persist=on_cluster,
        run_metadata={"flyte": _run_metadata(task, action)},
        attempt=_attempt_of(task),
        on_cluster=on_cluster,
    )


class Flyte2Context(ExecutionContext):
    """A task of Flyte 2, on a cluster or in local mode."""

    can_publish_files: bool = True

    def propagate_run(self, tracker: Tracker, run: Any) -> AbstractContextManager[None]:
        exported = tracker.export_run(run)
        if exported is None:
            return nullcontext()
        runs = {**_runs(custom_context() or {}), tracker.name: exported}
        return propagate({propagation.RUNS: propagation.write(runs, "the open run")})

    def persist(self, directory: str) -> str:
        """Copy a local directory to the run's raw data, and return its address."""
        storage = sys.modules["flyte"].storage
        address: str = task_context().raw_data_path.get_random_remote_path(os.path.basename(directory))
        storage.get_underlying_filesystem(path=address).put(directory, address, recursive=True)
        return address

    def publish_files(self, directory: str, run_id: str, is_async: bool) -> Any:
        """Make the run's files the output of a trace of the task; return an awaitable if `is_async`.

        Raises:
            RuntimeError: The process has no controller to record a trace with.
        """
        controllers = sys.modules.get("flyte._internal.controllers")
        if getattr(getattr(controllers, "_ControllerState", None), "controller", None) is None:
            raise RuntimeError("this process of the task has no controller to record a trace with")
        function = _trace_of_files(directory, is_async)
        return sys.modules["flyte"].trace(function)(run_id, _attempt_of(task_context()))

    def read_secret(self, secret: Any) -> str | None:
        """Return the value of a `flyte.Secret`. Outside a cluster it may be missing."""
        variable, mount = getattr(secret, "as_env_var", None), getattr(secret, "mount", None)
        if variable and os.environ.get(variable):
            return os.environ[variable]
        path = os.path.join(mount, *filter(None, [secret.group, secret.key])) if mount else ""
        if os.path.isfile(path):
            with open(path) as file:
                return file.read()
        if not self.on_cluster:
            return None
        raise TrackerUnavailableError(
            f"the secret with the key {secret.key!r} is missing: add secrets=flyte.Secret(key={secret.key!r}, "
            "as_env_var=...) to the TaskEnvironment, and pass the same as secret=",
            is_outage=False,
        )


def task_context() -> Any:
    """Return the `flyte.TaskContext` of this thread or coroutine; None outside of a task."""
    flyte = sys.modules.get("flyte")
    read = getattr(flyte, "ctx", None)
    return (read() or None) if read is not None else None


def custom_context() -> Mapping[str, str] | None:
    """Return the custom context of the task that runs here; None outside of a task."""
    task = task_context()
    return None if task is None else task.custom_context or {}


@contextmanager
def propagate(values: Mapping[str, str]) -> Iterator[None]:
    """Pass `values` to the tasks that are called in the block and to the processes that are started in it.

    Outside of a task, they reach only the processes.
    """
    outer = custom_context()
    merged_values = values if outer is None else {**outer, **values}
    with propagation.propagate({key: merged_values[key] for key in propagation.EXPORTED if key in merged_values}):
        if outer is None:
            yield
            return
        with sys.modules["flyte"].custom_context(**values):
            yield


def _trace_of_files(directory: str, is_async: bool) -> Any:
    """Return the function to trace. Its arguments include the attempt: a retry would get the first one's output."""
    io = importlib.import_module("flyte.io")

    def run_files(run_id: str, attempt: int) -> Any:  # noqa: ARG001
        return io.Dir.from_local_sync(directory)

    async def run_files_async(run_id: str, attempt: int) -> Any:  # noqa: ARG001
        return await io.Dir.from_local(directory)

    function: Any = run_files_async if is_async else run_files
    function.__name__ = "tracking_run_files"
    function.__annotations__ = {"run_id": str, "attempt": int, "return": io.Dir}
    return function


def _propagated(
    variables: Mapping[str, str] | None, custom_context: Mapping[str, str], action_name: str
) -> dict[str, Any]:
    """Return the arguments that reach a task. An id is for the first task's run: other tasks add their action's name.

    Args:
        variables: The variables of the task's environment; None in the task's process, which has them already.
        custom_context: The custom context that the caller passes to the task.
        action_name: The name of the task's action.
    """
    if variables is None:
        arguments = propagation.read(propagation.CONFIG, custom_context)
    else:
        layers = [variables.get(propagation.CONFIG), custom_context.get(propagation.CONFIG)]
        arguments = merged(*(propagation.parse(layer, propagation.CONFIG) for layer in layers))
    if arguments.get("id") and _runs(custom_context):
        arguments["id"] = f"{arguments['id']}-{action_name}"
    return arguments


def _runs(custom_context: Mapping[str, str]) -> dict[str, Any]:
    runs = propagation.parse(custom_context.get(propagation.RUNS), propagation.RUNS)
    if not all(isinstance(run, Mapping) and isinstance(run.get("id"), str) for run in runs.values()):
        raise ConfigError(
            f"{propagation.RUNS} in the custom context of the Flyte run must map trackers to runs with an id: do not "
            "set it, since tracked tasks do"
        )
    return runs


def _run_links(config: TrackingConfig, workers: NodeRequest | None, task: Any) -> Iterator[TrackingLink]:
    """Yield the links to the runs of `task`, which requests these nodes."""
    tracker = find_tracker(config.tracker)
    if tracker.page(config, None) is None:
        return
    relevant_names = (propagation.CONFIG, *tracker.run_id_variables)
    variables = {name: value for name, value in (task.env_vars or {}).items() if name in relevant_names}
    title = tracker.title
    # A link is pickled, and its pages do not depend on these: a callable may be one that cannot be pickled.
    config = replace(config, secret=None, primary_rank=0, given=config.given - {"secret", "primary_rank"})
    for index, page in enumerate(pages(workers, config.run_mode, config.rank_scope, "")):
        name = title if page.worker_index is None else f"{title} worker {page.worker_index}"
        yield TrackingLink(name, config, workers, index, variables)


def _workers(task: Any) -> NodeRequest | None:
    """Return the nodes that the task requests; None for a task that runs in one process."""
    config = task.plugin_config
    if config is None:
        return None
    if hasattr(config, "nnodes") and hasattr(config, "nproc_per_node"):  # flyteplugins.pytorch's Elastic
        return workers_of(config)
    settings = getattr(config, "settings", config)
    if hasattr(settings, "replicas") and hasattr(settings, "nproc_per_node"):  # flyte.clustered
        return NodeRequest(settings.replicas, settings.replicas, settings.nproc_per_node)
    return None


def _run_metadata(task: Any, action: Any) -> dict[str, Any]:
    values = {
        "run": action.run_name,
        "action": action.name,
        "project": action.project,
        "domain": action.domain,
        "task": os.environ.get("FLYTE_INTERNAL_TASK_NAME"),
        "attempt": _attempt_of(task),
        "url": os.environ.get("FLYTE_EXECUTION_URL") or _url(action),
    }
    return {name: value for name, value in values.items() if value is not None}


def _attempt_of(task: Any) -> int:
    """The number of earlier attempts. Flyte 2.0 does not say it, but a pod has the variable of later versions."""
    number: int | None = getattr(task, "attempt_number", None)
    return int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")) if number is None else number


def _url(action: Any) -> str | None:
    """Return the action's page in the console, from the pod's endpoint. The SDK's `Console` does the same.

    https://github.com/flyteorg/flyte-sdk/blob/v2.12.1/src/flyte/remote/_client/controlplane.py
    """
    endpoint = os.environ.get("_U_EP_OVERRIDE")
    if not endpoint or not action.project or not action.domain:
        return None
    scheme = "http" if os.environ.get("_U_INSECURE", "").lower() in ("true", "t", "1") else "https"
    host = endpoint.rpartition("//")[2].strip("/")
    host = "localhost:8080" if host == "localhost:8090" else host
    runs = f"{scheme}://{host}/v2/domain/{action.domain}/project/{action.project}/runs"
    return f"{runs}/{action.run_name}?i={action.name}"
