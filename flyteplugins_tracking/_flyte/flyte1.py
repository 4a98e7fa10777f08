"""Flyte 1. This module never imports flytekit: code that needs it runs only if the user's code has loaded it.

Task objects are recognized by the names of their classes. A task is changed in place: a new object would run in the
agent instead of the workers, and could not be serialized.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._flyte.target import Decorator, class_names, workers_of
from flyteplugins_tracking._rank.plan import NodeRequest, Page, pages
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import ExecutionContext, Task
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import find_tracker

logger = logging.getLogger(__name__)

_TASK = "flytekit.core.python_function_task.PythonFunctionTask"
_ELASTIC_TASK = "flytekitplugins.kfpytorch.task.PytorchElasticFunctionTask"
_OTHER_ENTITIES = {
    "flytekit.core.base_task.Task": "task without a Python function",
    "flytekit.core.workflow.WorkflowBase": "workflow",
    "flytekit.core.launch_plan.LaunchPlan": "launch plan",
}
_LINK_TYPE = "link_type"


class TaskFunction:
    """A tracked function that adds links to its task: a `flytekit.core.utils.ClassDecorator`.

    Its `task_function` is the user's function: with it, flytekit finds a task's module in a `__main__` script.
    """

    def __init__(self, tracked: Callable[..., Any], link: Mapping[str, str]) -> None:
        functools.update_wrapper(self, tracked, updated=())
        self._tracked = tracked
        self._link = dict(link)
        self.task_function = _users_function(tracked)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the tracked function."""
        return self._tracked(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance, as a function does."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """Return the attributes of a function that `inspect` reads: flytekit uses it to see whether this is async."""
        if name in ("__code__", "__defaults__", "__kwdefaults__"):
            return getattr(self._tracked, name)
        raise AttributeError(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by name, as functions are, if the name leads here. Otherwise by value, as Elastic's spawn does."""
        if _lookup(self.__module__, self.__qualname__) is self:
            return self.__qualname__
        return self.by_value()

    def by_value(self) -> tuple[Any, ...]:
        """Return the values from which `pickle` makes this object again, without its name."""
        return TaskFunction, (self._tracked, self._link)

    def get_extra_config(self) -> dict[str, str]:
        """Return the links of this decorator and of those inside it."""
        inner: dict[str, str] = getattr(getattr(self._tracked, "__wrapped__", None), "get_extra_config", dict)()
        types = [kind for links in (inner, self._link) for kind in links.get(_LINK_TYPE, "").split(",") if kind]
        return {**inner, **self._link, **({_LINK_TYPE: ",".join(dict.fromkeys(types))} if types else {})}


def is_entity(target: Any) -> bool:
    """Whether `target` is a task, a workflow or a launch plan of flytekit."""
    return not class_names(target).isdisjoint({_TASK, *_OTHER_ENTITIES})


def function_of(task: Any, advice: str) -> tuple[Callable[..., Any], NodeRequest | None]:
    """Return the function of `task`, and the nodes that it requests if it has Elastic workers.

    Raises:
        ConfigError: `task` is not a Python function task. The message ends with the `advice`.
    """
    names = class_names(task)
    if _TASK not in names:
        kind = next(kind for entity, kind in _OTHER_ENTITIES.items() if entity in names)
        raise ConfigError(f"{task.name!r} is a {kind}: {advice}")
    return task.task_function, workers_of(task.task_config) if _ELASTIC_TASK in names else None


def adapt_task(task: Any, _: NodeRequest | None, wrap: Callable[[Any, Task], Any], decorator: Decorator) -> Any:
    """Put `wrap` around the function of `task`, and return the same task."""
    timeout = task.metadata.timeout  # a timedelta, or None
    tracked = wrap(task.task_function, Task(None, timeout.total_seconds() if timeout else None))
    task._task_function = _adapted(tracked, _link(decorator.config, task))
    return task


def adapt_function(tracked: Any, decorator: Decorator) -> Any:
    """Add the link to `tracked` if flytekit is loaded: it may become the function of a task."""
    return tracked if "flytekit.core.utils" not in sys.modules else _adapted(tracked, _link(decorator.config, None))


def _link(config: TrackingConfig | None, task: Any) -> Mapping[str, str]:
    """Return the values for a task's template that link to the runs of `config`; none for None.

    Args:
        config: The user's arguments.
        task: The task; None for a function that may become one.
    """
    return {} if config is None else find_tracker(config.tracker).link(config, _pages(task, config))


def _adapted(tracked: Any, link: Mapping[str, str]) -> Any:
    sys.modules["flytekit.core.utils"].ClassDecorator.register(TaskFunction)
    _pickle_like_a_function_for_cloudpickle()
    return TaskFunction(tracked, link)


def _pages(task: Any, config: TrackingConfig) -> Sequence[Page] | None:
    """Return the pages of the task's links; None if the number of its workers and so of its runs is unknown."""
    if task is not None and (task.task_config is None or _ELASTIC_TASK in class_names(task)):
        workers = None if task.task_config is None else workers_of(task.task_config)
        return pages(workers, config.run_mode, config.rank_scope, "")
    one_run = config.run_mode != "new" and config.rank_scope == "global"
    return pages(None, config.run_mode, config.rank_scope, "") if one_run else None


def current_context() -> Flyte1Context:
    """Return flytekit's context of this execution."""
    flytekit = sys.modules["flytekit"]
    # Not is_local_execution(): it is False in a local spawn worker. Pods have this variable, and nothing else has.
    execution = os.environ.get("FLYTE_INTERNAL_EXECUTION_ID")
    runs_a_task = _runs_a_task(flytekit)
    is_pod = execution is not None and runs_a_task
    prefix = flytekit.current_context().raw_output_prefix if is_pod else ""
    base_id, group = _base_id_and_group(str(execution), prefix) if is_pod else (None, None)
    return Flyte1Context(
        base_id=base_id,
        group=group,
        propagated=propagation.read(propagation.CONFIG, None),
        run_metadata={} if execution is None else {"flyte": _run_metadata(execution)},
        attempt=_attempt(),
        on_cluster=execution is not None,
        can_persist=is_pod,
        can_publish_files=runs_a_task,
        success_exceptions=(sys.modules["flytekit.core.base_task"].IgnoreOutputs,),
    )


class Flyte1Context(ExecutionContext):
    """A process in which flytekit is loaded: a task's pod, a local execution, or a script."""

    def persist(self, directory: str) -> str:
        """Copy a local directory below the raw output prefix, and return its address."""
        access = sys.modules["flytekit"].FlyteContextManager.current_context().file_access
        address: str = access.put_raw_data(directory, upload_prefix="tracking")
        return address

    def publish_files(self, directory: str, run_id: str, is_async: bool) -> None:  # noqa: ARG002
        """Copy the run's files below the raw output prefix. Only its function returns the task's outputs."""
        logger.warning("the files of run %s are in FlyteDirectory(%r)", run_id, self.persist(directory))

    def read_secret(self, secret: Any) -> str | None:
        """Return the value of a flytekit `Secret`. Outside a cluster it may be missing."""
        secrets = sys.modules["flytekit"].current_context().secrets
        try:
            value: str = secrets.get(secret.group, secret.key, getattr(secret, "group_version", None))
            return value
        except Exception as error:
            if not self.on_cluster:
                return None
            expected = f"Secret(group={secret.group!r}, key={secret.key!r})"
            raise TrackerUnavailableError(
                f"the secret {expected} is missing: add secret_requests=[{expected}] to the task",
                is_outage=False,
            ) from error


def _runs_a_task(flytekit: Any) -> bool:
    """Whether flytekit runs a task in this process. A script that a task starts only inherits the variables.

    Pods of Flyte 2 have the same variables, and RUN_NAME and ACTION_NAME too.
    """
    state = flytekit.FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is not None and not {"RUN_NAME", "ACTION_NAME"} <= os.environ.keys()


def _base_id_and_group(execution: str, raw_output_prefix: str) -> tuple[str, str | None]:
    """Return the base id, `{execution}-{node}`, and a group.

    The raw output prefix ends in the name of the task execution, `{execution}-{node}-{attempt}`. No variable holds the
    node, and HOSTNAME differs between nodes. If the name is too long for the backend, it is a hash of 8 characters that
    includes the attempt. A retry is then a new run, in the group of the execution.
    https://github.com/flyteorg/flyte/blob/v1.16.0/flytepropeller/pkg/utils/encoder.go

    Returns:
        The base id, and a group for runs that the plan gives none.
    """
    name = os.path.basename(raw_output_prefix.rstrip("/"))
    index = _map_index()
    if re.fullmatch(r"f[a-z1-6]{7}", name):
        return name + index, execution
    name = name.removesuffix(f"-{os.environ.get('FLYTE_ATTEMPT_NUMBER', '0')}")
    if name != execution and not name.startswith(f"{execution}-"):
        name = f"{execution}-{name}"
    return name + index, None


def _map_index() -> str:
    """Return the suffix for this element of a map task, by the variables that `flytekit.bin.entrypoint` reads."""
    variable = os.environ.get("BATCH_JOB_ARRAY_INDEX_VAR_NAME")
    if not variable or variable not in os.environ:
        return ""
    return f"-{int(os.environ.get('BATCH_JOB_ARRAY_INDEX_OFFSET') or 0) + int(os.environ[variable])}"


def _run_metadata(execution: str) -> dict[str, Any]:
    env = os.environ
    values = {
        "execution": execution,
        "project": env.get("FLYTE_INTERNAL_EXECUTION_PROJECT"),
        "domain": env.get("FLYTE_INTERNAL_EXECUTION_DOMAIN"),
        "task": env.get("FLYTE_INTERNAL_TASK_NAME"),
        "attempt": _attempt(),
        "url": env.get("FLYTE_EXECUTION_URL"),
    }
    return {name: value for name, value in values.items() if value is not None}


def _attempt() -> int:
    return int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0"))


def _users_function(function: Any) -> Any:
    """Return the innermost function, through wrappers and other class decorators."""
    while True:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "task_function", None)
        if inner is None:
            return function
        function = inner


def _lookup(module: str, qualname: str) -> Any:
    value: Any = sys.modules.get(module)
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


def _pickle_like_a_function_for_cloudpickle() -> None:
    """Make cloudpickle treat a `TaskFunction` as a function: by value if it is in `__main__` or a registered module."""
    cloudpickle = sys.modules["cloudpickle"]

    def reduce(function: TaskFunction) -> Any:
        by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
        packages = itertools.accumulate(function.__module__.split("."), "{}.{}".format)
        if by_value.isdisjoint(packages):
            return function.__reduce_ex__(2)
        return function.by_value()

    cloudpickle.CloudPickler.dispatch_table[TaskFunction] = reduce
