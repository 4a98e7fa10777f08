"""Weights & Biases. `wandb` is imported when a run is opened, and only then.

Here is the tracker. In the room: ids and addresses (`names`), opening a run (`open`), an open run (`run`), a
`wandb.init` while it is open (`inner`), rows at a lower step (`placement`), the upload at its end (`ending`), a run
with several writers (`shared`) and the numbers of their rows (`roles`), rows that W&B may not have (`outbox`,
`attempts`, `datastore`, `sender`), the doctor's half (`diagnose`) and the private parts of `wandb` (`vendor`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.checks import check_choice, check_no_password
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker, template_values
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis
from flyteplugins_tracking.trackers.idle import keep_idle
from flyteplugins_tracking.trackers.wandb.names import (
    HOST,
    app,
    check_characters,
    check_host,
    forced_run_id,
    given_settings,
    quoted,
)

# The parameters of wandb.init that the decorator does not have itself. A test compares them with wandb: to import
# wandb for them would take every rank half a second.
INIT_ARGUMENTS = frozenset(
    {
        "allow_val_change",
        "anonymous",
        "config_exclude_keys",
        "config_include_keys",
        "dir",
        "entity",
        "force",
        "fork_from",
        "job_type",
        "mode",
        "monitor_gym",
        "reinit",
        "resume",
        "resume_from",
        "save_code",
        "settings",
        "sync_tensorboard",
        "tensorboard",
    }
)
# The values of these arguments.
_CHOICES = {
    "mode": {"online", "offline", "disabled", "dryrun"},
    "resume": {"allow", "never", "must", "auto"},
    "reinit": {"default", "return_previous", "finish_previous", "create_new"},
}


class WandbTracker(Tracker):
    """Opens W&B runs."""

    name = "wandb"
    title = "Weights & Biases"
    package = "wandb"
    distribution = '"flyteplugins-tracking[wandb]"'
    takes_roles = True
    run_id_variables = ("WANDB_RUN_ID",)
    arguments = INIT_ARGUMENTS | {HOST}

    def forced_run_id(self) -> str | None:
        return forced_run_id()

    def check(self, config: TrackingConfig) -> None:
        options = config.options
        check_host(options.get(HOST))
        check_characters("run id", config.id, "an id")
        check_characters("project", config.project, "a project")
        if options.get("mode") == "shared":
            raise ConfigError("mode='shared' is set by this library: pass run_mode='shared' instead")
        for name, allowed in _CHOICES.items():
            if isinstance(options.get(name), str):
                check_choice(name, options[name], allowed)
        if config.has_roles and isinstance(config.config, str):
            raise ConfigError(
                "config= is a file, and a run with roles needs it as a mapping: each job has its part of it"
            )
        refused = [name for name in ("resume", "resume_from", "fork_from") if config.has_roles and name in options]
        if refused:
            raise ConfigError(f"{refused[0]}= cannot be used in a run with roles: its id says which run it is")
        settings = options.get("settings")
        if settings is not None and not isinstance(settings, Mapping) and not hasattr(settings, "model_fields_set"):
            raise ConfigError(f"settings= must be a mapping or a wandb.Settings, got {type(settings).__name__}")
        given = given_settings(options)
        if given.get("api_key"):
            raise ConfigError(
                "settings= must not hold an API key, because it is pickled with the task: pass secret=... instead"
            )
        for name in ("base_url", "http_proxy", "https_proxy"):
            variable = f"{'' if 'proxy' in name else 'WANDB_'}{name.upper()}"
            check_no_password(f"settings[{name!r}]", given.get(name), f"set {variable} where the task runs")

    def page(self, config: TrackingConfig, page: Page | None) -> str:
        host, entity, project = app(config), config.options.get("entity"), config.project
        if not entity or not project:
            return host
        address = f"{host}/{quoted(entity)}/{quoted(project)}"
        if page is None:
            return address
        of_group = page.kind == "group"
        return f"{address}/{page.kind}s/{quoted((config.group if of_group else None) or page.id)}"

    def place(self, config: TrackingConfig) -> Mapping[str, str | None]:
        entity = config.options.get("entity") or os.environ.get("WANDB_ENTITY")
        project = config.project or os.environ.get("WANDB_PROJECT")
        return {"entity": entity, "project": project, "server": app(config)}

    def resumes(self, config: TrackingConfig) -> bool:
        return bool(config.options.get("resume", os.environ.get("WANDB_RESUME")) != "never")

    def link(self, config: TrackingConfig, pages: Sequence[Page] | None) -> Mapping[str, str]:
        entity = config.options.get("entity")
        place = {"host": app(config), "entity": entity, "project": config.project}
        above = "host" if not config.project or not entity else "project" if pages is None else ""
        return template_values("wandb", config, pages or (), place, above)

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        from flyteplugins_tracking.trackers.wandb.run import passed_on

        return passed_on(run)

    def on_inactive_rank(self, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
        return keep_idle(self.name, config, info)

    def diagnose(self) -> Diagnosis:
        from flyteplugins_tracking.trackers.wandb.diagnose import diagnose

        return diagnose()

    def open(self, request: RunRequest) -> Handle:
        from flyteplugins_tracking.trackers.wandb.open import open_run

        return open_run(request)


TRACKER = WandbTracker()
