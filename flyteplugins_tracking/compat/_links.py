"""Links of Flyte 2 that a user puts on a task: `@env.task(links=[Wandb(...)])`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._config.config import TrackingConfig
from flyteplugins_tracking._flyte.flyte2 import TrackingLink
from flyteplugins_tracking._job.plan import RankScope, RunMode
from flyteplugins_tracking._sweeps.sweep import SweepLink
from flyteplugins_tracking.trackers.registry import check_config

_HOST = "https://wandb.ai"


@dataclass
class Wandb:
    """A link to the run of a task, as `@wandb_init` adds it by itself.

    Attributes:
        host: The address of W&B. Another than the default goes before what is propagated to the task.
        project: The run's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        run_mode: In "auto" and "shared" the link is to the run of the task that calls this one, if it has one.
        rank_scope: Without effect: the link is to one run.
        id: The run's id; None for `{run}-{action}`.
        name: What the console shows.
        icon_uri: The address of an icon.
    """

    host: str = _HOST
    project: str | None = None
    entity: str | None = None
    run_mode: RunMode = "auto"
    rank_scope: RankScope = "global"
    id: str | None = None
    name: str = "Weights & Biases"
    icon_uri: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot work now, and not when the task is submitted.

        Raises:
            ConfigError: An argument that cannot work.
        """
        self._config()

    def get_link(
        self,
        run_name: str,
        project: str,
        domain: str,
        context: Mapping[str, str],
        parent_action_name: str,
        action_name: str,
        pod_name: str,
        **kwargs: Any,
    ) -> str:
        """The run's page; the project's or W&B's where the run or the project is not known."""
        link = TrackingLink(self.name, self._config())
        return link.get_link(run_name, project, domain, context, parent_action_name, action_name, pod_name, **kwargs)

    def _config(self) -> TrackingConfig:
        given = {"run_mode": self.run_mode, "rank_scope": self.rank_scope, "id": self.id}
        return _checked({**given, **_place(self)})


@dataclass
class WandbSweep:
    """A link to the sweep of a task.

    Attributes:
        host: The address of W&B. Another than the default goes before what is propagated to the task.
        project: The sweep's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        id: The sweep's id; None for that of the task's sweep, or of the task that calls it.
        name: What the console shows.
        icon_uri: The address of an icon.
    """

    host: str = _HOST
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    name: str = "Weights & Biases Sweep"
    icon_uri: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot work now, and not when the task is submitted.

        Raises:
            ConfigError: An argument that cannot work.
        """
        _checked(_place(self))

    def get_link(
        self,
        run_name: str,
        project: str,
        domain: str,
        context: Mapping[str, str],
        parent_action_name: str,
        action_name: str,
        pod_name: str,
        **kwargs: Any,
    ) -> str:
        """The sweep's page; the page of all sweeps, or W&B's, where the sweep or the project is not known."""
        link = SweepLink({**_place(self), **({"id": self.id} if self.id else {})}, self.name)
        return link.get_link(run_name, project, domain, context, parent_action_name, action_name, pod_name, **kwargs)


def _place(link: Wandb | WandbSweep) -> dict[str, Any]:
    """Where the link says that its run or sweep is."""
    host = None if link.host == _HOST else link.host
    place = {"project": link.project, "entity": link.entity, "host": host}
    return {name: value for name, value in place.items() if value is not None}


def _checked(arguments: Mapping[str, Any]) -> TrackingConfig:
    config = TrackingConfig.from_arguments({name: value for name, value in arguments.items() if value is not None})
    check_config(config)
    return config
