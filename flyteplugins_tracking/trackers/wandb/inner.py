"""`wandb.init` in a decorated function, as scripts and frameworks call it: it joins the function's run.

The run gains what the call says and `tracking_init` does not: config, name, notes, tags. What places a run stays as it
is: its project, its id, its group. A WANDB_ variable that the script has set since is as an argument. W&B's own `init`
is not called: it would make a directory for another run, and refuse `resume="must"` beside a run that is open.

Under the command `run`, the first call opens the run.

On a rank without a run, the call returns a run that does nothing. A call that asks for another run (`reinit=` is
"create_new" or "finish_previous"), one in a forked child and one in a sweep's trial that the function runs are W&B's
own, on each rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flyteplugins_tracking._rank.children import variables_at_birth
from flyteplugins_tracking.trackers import client
from flyteplugins_tracking.trackers.idle import is_idle, tell_row, undo_later
from flyteplugins_tracking.trackers.registry import open_waiting, waiting
from flyteplugins_tracking.trackers.wandb import outbox, vendor
from flyteplugins_tracking.trackers.wandb.names import forced_run_id, given_settings
from flyteplugins_tracking.trackers.wandb.run import HANDLE, WandbHandle

_CONFIG = ("config", "config_exclude_keys", "config_include_keys")
# These say how a run is opened, and change nothing in one that is open; or they have their effect in `_patch`.
_OPENING = ("allow_val_change", "anonymous", "force", "reinit", "resume")
_PATCHING = ("monitor_gym", "sync_tensorboard", "tensorboard")
_ANOTHER = (True, "create_new", "finish_previous")
# The variables that are arguments too.
_VARIABLES = {
    **{f"WANDB_{name.upper()}": name for name in ("name", "notes", "tags", "project", "job_type", "dir", "mode")},
    "WANDB_RUN_GROUP": "group",
}


def join_clients_calls(_: object = None) -> None:
    """Have `wandb.init` join the runs of decorated functions from now on. Called when `wandb` is loaded."""
    import wandb

    client.join_calls(wandb.init, _join)


def _join(arguments: Mapping[str, Any]) -> Any:
    """Return the run for a call of `wandb.init`; None if it is W&B's own."""
    given = {**_changed_variables(), **{name: value for name, value in arguments.items() if value is not None}}
    given = _open_waiting(given)
    runs, is_another = vendor.open_runs(), _setting(given, "reinit") in _ANOTHER
    # The one that W&B would return: the latest that is open. An attached or disabled one is `wandb.run`.
    run = runs[-1] if runs else vendor.global_run()
    handle: WandbHandle | None = None if run is None else vars(run).get(HANDLE)
    if handle is None or handle.pid != os.getpid():
        is_off = is_idle("wandb") and not is_another and (run is None or run.disabled)
        return _without_effect(given) if is_off else None
    if forced_run_id() not in (None, handle.id):  # a sweep's trial, which `wandb.agent` has begun in the function
        return None
    if is_another and not run.disabled:
        return None
    # The decorator's mode="disabled" is for all that its function does. W&B reads the variable once.
    if is_another or (_setting(given, "mode") == "disabled" and not run.disabled):
        return vendor.init(**{**given, "mode": "disabled"})
    if not run.disabled:
        _patch(run, given)
    _describe(handle, given)
    vendor.set_global_run(run)  # the end of another run, opened with reinit=, has unset it
    return run


def _open_waiting(given: dict[str, Any]) -> dict[str, Any]:
    """Have the first call of a script open the run that waits for it. Return what is left for the run that is open.

    A run that does nothing, and one that the script's ranks share by themselves, are W&B's own.
    """
    is_own = not {"disabled", "shared"}.isdisjoint((_setting(given, "mode"), os.environ.get("WANDB_MODE")))
    # In this process, `wandb.agent` sets the variable for each trial that it runs.
    is_trial = forced_run_id() not in (None, variables_at_birth().get("WANDB_RUN_ID"))
    if "wandb" not in waiting.openers or is_own or is_trial or _setting(given, "reinit") == "create_new":
        return given
    kept = {name: given[name] for name in (*_CONFIG, *_PATCHING) if name in given}
    open_waiting("wandb", {name: value for name, value in given.items() if name not in (*kept, "reinit")})
    return kept


def _changed_variables() -> dict[str, Any]:
    """Return the arguments that variables say which the script has set since W&B has read them."""
    known = vendor.known_variables()
    new = {
        argument: os.environ[name]
        for name, argument in _VARIABLES.items()
        if os.environ.get(name) not in (None, "", known.get(name))
    }
    return {**new, "tags": new["tags"].split(",")} if "tags" in new else new


def _setting(given: Mapping[str, Any], name: str) -> Any:
    """Return an argument that may be a setting too."""
    return given.get(name, given_settings(given).get(name))


def _without_effect(given: Mapping[str, Any]) -> Any:
    """Return a run that does nothing. Its first row is told."""
    run = vendor.init(**{**given, "mode": "disabled"})
    log = run.log

    def tell(*arguments: Any, **options: Any) -> Any:
        tell_row("wandb", "W&B")
        return log(*arguments, **options)

    run.log = tell
    vendor.set_global_run(run)
    undo_later("wandb", remove_without_effect)
    return run


def remove_without_effect() -> None:
    """Unset `wandb.run` if it does nothing, at the end of the function on a rank without a run."""
    run = vendor.global_run()
    if run is not None and run.disabled and HANDLE not in vars(run):
        vendor.set_global_run(None)


def _patch(run: Any, given: Mapping[str, Any]) -> None:
    """Switch on what W&B's `init` does for frameworks, beside the run."""
    if _setting(given, "sync_tensorboard") or given.get("tensorboard"):
        vendor.sync_tensorboard()
        outbox.of(run).add_writer()
    if given.get("monitor_gym"):
        vendor.monitor_gym()


def _describe(handle: WandbHandle, given: Mapping[str, Any]) -> None:
    """Add to the run what it does not have, and warn once about what has no effect. The first call names the run."""
    run, request = handle.run, handle.request
    if request.plan.ends_run:
        for name in ("name", "notes"):
            if given.get(name) and getattr(request.config, name) is None and not handle.is_described:
                setattr(run, name, given[name])
        tags = given.get("tags") or ()
        new_tags = [tag for tag in ((tags,) if isinstance(tags, str) else tags) if tag not in (run.tags or ())]
        if new_tags:
            run.tags = (*(run.tags or ()), *dict.fromkeys(new_tags))
    handle.is_described = True
    config: Mapping[str, Any] = {}
    if "config" in given:
        config = vendor.parse_config(
            given["config"], given.get("config_exclude_keys"), given.get("config_include_keys")
        )
    new = handle.describe(
        "wandb.init", {**given, "config": config, "settings": _changed_settings(run, given)}, _placed(run, given)
    )
    if new:
        run.config.update(new, allow_val_change=True)


def _placed(run: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run has in place of a call's arguments that do not change it."""
    if run.disabled:
        return {}
    names = given.keys() - {*_CONFIG, *_OPENING, *_PATCHING, "tags"}
    placed = {name: getattr(run, name, getattr(run.settings, name, None)) for name in names}
    return {**placed, "dir": run.settings.root_dir, "settings": []}


def _changed_settings(run: Any, given: Mapping[str, Any]) -> list[str]:
    """Return the names of a call's settings that the run does not have, without their values: they may hold a key."""
    values = given_settings(given)
    names = values.keys() - {*_OPENING}
    return sorted(name for name in names if repr(values[name]) != repr(getattr(run.settings, name, None)))
