"""Weights & Biases. The vendor's package is imported when a run is opened, and only then."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking.config import OWN_ARGUMENTS, TrackingConfig, check_arguments, check_choice
from flyteplugins_tracking.errors import ConfigError, TrackerNotInstalledError, TrackerUnavailableError
from flyteplugins_tracking.lifecycle import RunRequest
from flyteplugins_tracking.trackers.base import Handle

logger = logging.getLogger(__name__)

# The parameters of wandb.init that the decorator does not take by name. Importing wandb to ask it would cost every
# rank half a second; a test compares.
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
# https://docs.wandb.ai/models/ref/python/functions/init: these may not stand in a run id.
_NOT_IN_AN_ID = "/\\#?%:"
_APP = "https://wandb.ai"
# The texts that these arguments take.
_CHOICES = {
    "mode": {"online", "offline", "disabled", "dryrun"},
    "resume": {"allow", "never", "must", "auto"},
    "reinit": {"default", "return_previous", "finish_previous", "create_new"},
}
# What the vendor and the frameworks call to end "the" run. While the function runs it is ours to end.
_ENDINGS = ("finish", "_finish")


class WandbTracker:
    """Opens W&B runs."""

    name = "wandb"
    run_id_variables = ("WANDB_RUN_ID",)

    def check(self, config: TrackingConfig) -> None:
        """See `Tracker.check`."""
        options = config.options
        check_arguments("wandb.init", options, INIT_ARGUMENTS | OWN_ARGUMENTS)
        _check_id(config.id)
        if options.get("mode") == "shared":
            raise ConfigError("mode='shared' is W&B's: pass run_mode='shared'")
        for name, allowed in _CHOICES.items():
            if isinstance(options.get(name), str):
                check_choice(name, options[name], allowed)
        settings = options.get("settings")
        if settings is not None and not isinstance(settings, Mapping) and not hasattr(settings, "model_fields_set"):
            raise ConfigError(f"settings= takes a mapping or wandb.Settings, not {type(settings).__name__}")
        if _has_api_key(settings):
            raise ConfigError("settings= holds an API key, which would be pickled with the task: pass secret=...")
        if config.run_mode == "shared":
            raise ConfigError("run_mode='shared' is not there yet for W&B: pass run_mode='auto' or 'new'")

    def link(self, config: TrackingConfig) -> Mapping[str, str]:
        """See `Tracker.link`."""
        values = {"entity": config.options.get("entity"), "project": config.project, "id": config.id}
        return {
            "link_type": _link_type(config),
            "wandb_host": os.environ.get("WANDB_BASE_URL", _APP).replace("https://api.wandb.ai", _APP).rstrip("/"),
            **{f"wandb_{name}": str(value) for name, value in values.items() if value is not None},
        }

    def open(self, request: RunRequest) -> Handle:
        """See `Tracker.open`."""
        _check_id(request.plan.run_id)
        _require_wandb()
        _drop_inherited_service()
        try:
            run = _init(request)
        except TrackerUnavailableError as unavailable:
            if request.config.if_unavailable == "raise":
                raise
            run = _init(request, mode="offline")
            logger.warning(
                "%s This run is logged offline. Send it when W&B is there: wandb sync %s", unavailable, _directory(run)
            )
        if isinstance(request.config.config, str):
            run.config.update(dict(request.facts), allow_val_change=True)
        return WandbHandle(run, finish_timeout_s=request.config.finish_timeout_s)


class WandbHandle:
    """An open W&B run, which `wandb.run` is while the function runs."""

    def __init__(self, run: Any, finish_timeout_s: float) -> None:
        self.run = run
        self._finish_timeout_s = finish_timeout_s
        self._before = None if _global_run() is run else _global_run()
        _make_global(run)
        self._overlaid = {name: vars(run).get(name) for name in _ENDINGS if hasattr(run, name)}
        for name in self._overlaid:
            setattr(run, name, _leave_open)

    def finish(self, exit_code: int) -> None:
        """See `Handle.finish`."""
        for name, own in self._overlaid.items():
            delattr(self.run, name)
            if own is not None:
                setattr(self.run, name, own)
        try:
            self.run.finish(exit_code=exit_code)
        except TimeoutError:
            logger.warning(
                "W&B did not take all of run %s within finish_timeout_s=%g. Nothing is lost: wandb sync %s",
                self.run.id,
                self._finish_timeout_s,
                _directory(self.run),
            )
        finally:
            if self._before is not None and not getattr(self._before, "_is_finished", False):
                _make_global(self._before)


def _link_type(config: TrackingConfig) -> str:
    """The page that the link can name: the run's, the project's where there are several runs, or the host's."""
    if config.project is None or "entity" not in config.options:
        return "tracking-wandb-host"
    if (config.run_mode, config.rank_scope) != ("auto", "global"):
        return "tracking-wandb-project"
    return "tracking-wandb" if config.id is None else "tracking-wandb-id"


def _leave_open(*_: object, **__: object) -> None:
    """Stands in for `run.finish` while the function runs: its end alone is the run's end.

    Accelerate's `end_training()` and hyperparameter searches call `finish`; after it a crash would be a success.
    """


def _init(request: RunRequest, mode: str | None = None) -> Any:
    import wandb

    try:
        return wandb.init(**_init_arguments(request, mode))
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise TrackerUnavailableError(
            f"W&B cannot be used: {cause}. Check WANDB_BASE_URL, the API key and the network; or log offline with "
            "WANDB_MODE=offline or if_unavailable='degrade'."
        ) from error


def _init_arguments(request: RunRequest, mode: str | None = None) -> dict[str, Any]:
    """What `wandb.init` is called with. `WANDB_*` variables go before what we would add, not before the user.

    Raises:
        TrackerUnavailableError: The run would be online, and there is no key.
    """
    plan, config = request.plan, request.config
    mode = mode or config.options.get("mode")
    arguments = {
        **config.options,
        "mode": mode,
        "settings": _settings(mode, request),
        "project": config.project,
        **(_metadata(request) if plan.primary else {}),
        **_id_arguments(request),
        "group": config.group or (None if os.environ.get("WANDB_RUN_GROUP") else plan.group),
    }
    if _global_run() is not None:
        arguments.setdefault("reinit", "create_new")
    return {name: value for name, value in arguments.items() if value is not None}


def _metadata(request: RunRequest) -> dict[str, Any]:
    """What the primary alone passes."""
    config = request.config
    values = config.config if isinstance(config.config, str) else {**request.facts, **config.config}
    return {"name": config.name, "tags": config.tags, "notes": config.notes, "config": values}


def _id_arguments(request: RunRequest) -> dict[str, Any]:
    """The id, to be resumed: after a restart or a retry the same run goes on and keeps its rows."""
    options = request.config.options
    if request.plan.run_id is None or "resume_from" in options:
        return {}
    if {"resume", "fork_from"} & options.keys() or "WANDB_RESUME" in os.environ:
        return {"id": request.plan.run_id}
    return {"id": request.plan.run_id, "resume": "allow"}


def _settings(mode: str | None, request: RunRequest) -> Any:
    """The user's settings, the deadlines where they set none, and the key. A copy: `wandb.init` writes into it."""
    import wandb
    from wandb.sdk import wandb_setup

    settings = wandb.Settings(
        init_timeout=request.config.init_timeout_s,
        finish_timeout=request.config.finish_timeout_s,
        finish_timeout_raises=True,
    )
    given = request.config.options.get("settings")
    if isinstance(given, Mapping):
        settings.update_from_dict(dict(given))
    elif given is not None:
        settings.update_from_settings(given)
    effective = wandb_setup.singleton().settings.model_copy()
    effective.update_from_settings(settings)
    if (mode or effective.mode) not in ("offline", "disabled", "dryrun"):
        _authenticate(settings, effective.base_url, request)
    return settings


def _authenticate(settings: Any, host: str, request: RunRequest) -> None:
    """Put the user's secret into `settings`, or make sure that W&B finds a key rather than prompt on a rank."""
    key = request.read_secret()
    if key:
        settings.api_key = key.strip()  # a trailing line end would be refused, with the key in the text
    elif not request.may_prompt and not _has_credentials(host):
        raise TrackerUnavailableError(
            "W&B: there is no API key for this process. Run `wandb login`, set WANDB_API_KEY, or pass secret= to "
            "tracking_init (under flytekit, secret_requests= to the task too); or log offline with "
            "WANDB_MODE=offline or if_unavailable='degrade'."
        )


def _has_credentials(host: str) -> bool:
    """Whether `wandb.init` will find a key. `wandb.login(host=)` would ask the server and write to the user's files."""
    try:
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:
        return True  # then wandb.init tells
    return authenticate_session(host=host, source="tracking_init", prompt=False) is not None


def _check_id(run_id: str | None) -> None:
    bad = sorted(set(run_id or "") & set(_NOT_IN_AN_ID))
    if bad:
        raise ConfigError(f"run id {run_id!r} has {' '.join(bad)}, which W&B does not take in an id")


def _has_api_key(settings: Any) -> bool:
    if isinstance(settings, Mapping):
        return bool(settings.get("api_key"))
    return bool(getattr(settings, "api_key", None))


def _directory(run: Any) -> str:
    """What `wandb sync` takes."""
    return os.path.dirname(str(run.dir))


def _require_wandb() -> None:
    if "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise TrackerNotInstalledError('pip install "flyteplugins-tracking[wandb]"')


def _drop_inherited_service() -> None:
    """A WANDB_SERVICE that this process did not start is its parent's: a run in it ends when the parent's does."""
    from wandb.sdk import wandb_setup

    if getattr(wandb_setup.singleton(), "_connection", None) is None:
        os.environ.pop("WANDB_SERVICE", None)


def _global_run() -> Any:
    """What `wandb.run` is; None for a forked child, where it is the parent's."""
    import wandb

    inherited = wandb.run is not None and getattr(wandb.run, "_init_pid", os.getpid()) != os.getpid()
    return None if inherited else wandb.run


def _make_global(run: Any) -> None:
    """Set `wandb.run`: `reinit="create_new"` leaves it, and the frameworks log to it."""
    if _global_run() is run:
        return
    with contextlib.suppress(ImportError):
        from wandb.sdk.wandb_init import _set_global_run

        _set_global_run(run)


TRACKER = WandbTracker()
