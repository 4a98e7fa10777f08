"""Links of Flyte 2 that a user puts on a task: `@env.task(links=[Wandb(...)])`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyteplugins_tracking._flyte.flyte2 import TrackingLink
from flyteplugins_tracking._rank.plan import RankScope, RunMode
from flyteplugins_tracking._sweeps.sweep import SweepLink
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import check_config

_HOST = "https://wandb.ai"


@dataclass
class Wandb:
    """A link to the run of a task, as `@wandb_init` adds it by itself.

    Attributes:
        host: The address of W&B. If it is not the default, it takes precedence over the propagated one.
        project: The run's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        run_mode: With "auto" and "shared" the link leads to the run of the calling task, if it has one.
        rank_scope: Has no effect: the link leads to one run.
        id: The run's id; None for `{run}-{action}`.
        name: The link's name in the console.
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
        """Refuse invalid arguments now rather than when the task is submitted.

        Raises:
            ConfigError: An argument is invalid.
        """
        self._config()

    def get_link(self, **of_task: Any) -> str:
        """Return the run's page, or the project's or W&B's if the run or the project is not known."""
        return TrackingLink(self.name, self._config()).get_link(**of_task)

    def _config(self) -> TrackingConfig:
        run_arguments = {"run_mode": self.run_mode, "rank_scope": self.rank_scope, "id": self.id}
        return _checked({**run_arguments, **_location(self)})


@dataclass
class WandbSweep:
    """A link to the sweep of a task.

    Attributes:
        host: The address of W&B. If it is not the default, it takes precedence over the propagated one.
        project: The sweep's project; None for the propagated one.
        entity: Its entity; None for the propagated one.
        id: The sweep's id; None for the sweep of the task or of the task that calls it.
        name: The link's name in the console.
        icon_uri: The address of an icon.
    """

    host: str = _HOST
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    name: str = "Weights & Biases Sweep"
    icon_uri: str = ""

    def __post_init__(self) -> None:
        """Refuse invalid arguments now rather than when the task is submitted.

        Raises:
            ConfigError: An argument is invalid.
        """
        _checked(_location(self))

    def get_link(self, **of_task: Any) -> str:
        """Return the sweep's page, or the page of all sweeps or W&B's if the sweep or the project is not known."""
        location = {**_location(self), **({"id": self.id} if self.id else {})}
        return SweepLink(location, self.name).get_link(**of_task)


def _location(link: Wandb | WandbSweep) -> dict[str, Any]:
    """Return the project, entity and host that are set on the link."""
    host = None if link.host == _HOST else link.host
    location = {"project": link.project, "entity": link.entity, "host": host}
    return {name: value for name, value in location.items() if value is not None}


def _checked(arguments: Mapping[str, Any]) -> TrackingConfig:
    config = TrackingConfig.from_arguments({name: value for name, value in arguments.items() if value is not None})
    check_config(config)
    return config
