"""Weights & Biases. `wandb` is imported when a run is opened, and only then.

Here are the tracker, and its rules for ids and addresses. In the room: opening a run (`open`), an open run (`run`), a
`wandb.init` while it is open (`inner`), rows at a lower step (`late`), the upload at its end (`ending`), a run with
several writers (`shared`) and the numbers of their rows (`roles`), rows that W&B may not have (`outbox`, `send`,
`datastore`), the doctor's half (`diagnose`) and the private parts of `wandb` (`vendor`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page, primary_rank_of
from flyteplugins_tracking._util.checks import check_choice, check_no_password
from flyteplugins_tracking._util.fork import PerProcess, register
from flyteplugins_tracking._util.modules import loaded, when_loaded
from flyteplugins_tracking._util.proc import environment
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker, template_values
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis

# Our argument: wandb.init has a setting for it.
HOST = "host"
# A run id and a project must not contain these: https://docs.wandb.ai/models/ref/python/functions/init
_NOT_IN_AN_ID = "/\\#?%:"
_APP = "https://wandb.ai"
# The pages of W&B's own services, by the addresses of the servers that clients talk to.
_APPS = {"https://api.wandb.ai": _APP, "https://api.forge.coreweave.com": "https://forge.coreweave.com/wandb"}
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


class _Inactive(PerProcess):
    """The ranks without a run whose functions run in this process, each with who has it.

    It is (7, "rank 0") for rank 7; (0, "") where tracking is switched off.
    """

    def __init__(self) -> None:
        self.ranks: list[tuple[int, str]] = []


inactive = register(_Inactive())


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
        given = dict(settings) if isinstance(settings, Mapping) else vars(settings) if settings else {}
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
        rank, owner = 0, ""
        if info is not None:
            primary = primary_rank_of(info, config.run_mode, config.rank_scope, config.primary_rank)
            rank, owner = info.rank, f"{'local ' * (config.rank_scope == 'worker')}rank {primary}"
        inactive.ranks.append((rank, owner))
        forget = when_loaded("wandb", lambda: _inner().join_calls())

        def undo() -> None:
            forget()
            inactive.ranks.remove((rank, owner))
            if not inactive.ranks and loaded("wandb") is not None:
                _inner().remove_without_effect()

        return undo

    def diagnose(self) -> Diagnosis:
        from flyteplugins_tracking.trackers.wandb.diagnose import diagnose

        return diagnose()

    def open(self, request: RunRequest) -> Handle:
        from flyteplugins_tracking.trackers.wandb.open import open_run

        return open_run(request)


def _inner() -> Any:
    from flyteplugins_tracking.trackers.wandb import inner

    return inner


def forced_run_id() -> str | None:
    """The id of every run that is opened in a trial of a sweep, whatever id was asked for."""
    return os.environ.get("WANDB_RUN_ID", "").strip() or None if os.environ.get("WANDB_SWEEP_ID", "").strip() else None


def drop_empty_variables() -> None:
    """Have W&B's variables that are empty, as templates leave them, count as not set: wandb refuses some of them."""
    for name in [name for name, value in environment().items() if name.startswith("WANDB_") and not value.strip()]:
        os.environ.pop(name, None)


def check_characters(subject: str, text: str | None, place: str) -> None:
    """Refuse an id or a project with a character that W&B does not accept.

    Args:
        subject: What it is, in the message.
        text: The id or the project.
        place: What W&B does not accept the character in.

    Raises:
        ConfigError: It has one.
    """
    bad = sorted(set(text or "") & set(_NOT_IN_AN_ID))
    if bad:
        raise ConfigError(
            f"{subject} {text!r} contains {' '.join(bad)}, which W&B does not accept in {place}: use letters, digits, "
            "- and _"
        )


def check_host(host: object) -> None:
    """Refuse a `host=` that is not an address, or holds a password.

    Raises:
        ConfigError: It is not.
    """
    if host is not None and not (isinstance(host, str) and host.startswith(("https://", "http://"))):
        raise ConfigError(f"host= must be an address such as 'https://wandb.example.com', got {host!r}")
    check_no_password("host=", host, "set WANDB_BASE_URL where the task runs")


def app(config: TrackingConfig) -> str:
    """The address that people open: `host=`, or that of the server that the client talks to."""
    settings = config.options.get("settings")
    base_url = settings.get("base_url") if isinstance(settings, Mapping) else getattr(settings, "base_url", None)
    server = os.environ.get("WANDB_APP_URL") or os.environ.get("WANDB_BASE_URL") or base_url or _APP
    address = str(config.options.get(HOST) or server).rstrip("/")
    return without_credentials(_APPS.get(address, address))


def api_of(host: str) -> str | None:
    """Return the address of the API for the address of the pages; None for W&B's own service, which wandb knows."""
    return None if host.rstrip("/") in _APPS.values() else host


def quoted(name: str) -> str:
    """Quote a name for an address. Flyte's templates ({{...}}) stay as they are."""
    return quote(name, safe="{}")


TRACKER = WandbTracker()
