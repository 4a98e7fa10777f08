"""A W&B run to which others write too: the ranks of a job with `run_mode="shared"`, a run's roles, a task's tasks.

Each writer has a client of its own, in W&B's shared mode, and depends on no other one:
https://docs.wandb.ai/models/track/log/distributed-training. A client in another mode beside these would lose rows
(https://github.com/wandb/wandb/issues/12269). The primary's end is the run's. Before it, the primary waits for the
others (`trackers.barrier`). Which rows have arrived is told by their numbers: see `roles`.

All writers have one step counter, which W&B counts. So here, `log(step=)` sets a column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.barrier import WriterBarrier
from flyteplugins_tracking.trackers.base import RunRequest
from flyteplugins_tracking.trackers.client import prefix_of, run_config, status_of
from flyteplugins_tracking.trackers.rows import RowBuffer
from flyteplugins_tracking.trackers.wandb import roles, vendor
from flyteplugins_tracking.trackers.wandb.attempts import Place
from flyteplugins_tracking.trackers.wandb.run import WandbHandle


class SharedHandle(WandbHandle):
    """An open W&B run with several writers: this one's rows are kept apart from theirs."""

    def __init__(self, run: Any, before: Any, request: RunRequest, barrier: WriterBarrier | None = None) -> None:
        """Take over the run, and show the function its config.

        Args:
            run: The open run.
            before: The earlier `wandb.run`.
            request: The decorator's request for this run.
            barrier: Where the primary waits for the other ranks; None if there are none.
        """
        role = request.plan.role
        step_metric = request.config.step_metric if role is None else f"{role}/step"
        self.prefix = prefix_of(request)
        self._rows = RowBuffer(step_metric, self.prefix, self._define_step, None if role is None else 0)
        # Whether the run has roles, and this rank speaks for its job.
        self._speaks = request.config.has_roles and request.plan.primary and not run.disabled
        if self._speaks:
            roles.define_columns(run, role)
        super().__init__(run, before, request, barrier)
        self._show_config()
        if self._speaks:
            section = dict(self.run.config).get(role)  # another writer may replace that of the run
            self._tell("running", **({"config": json.dumps(section, default=str)} if section else {}))

    # Rows

    def log(self, data: Any, step: Any = None, **kwargs: Any) -> None:
        self._rows.log(self._log_row, data, step, **kwargs)

    def _log_row(self, row: dict[str, Any]) -> Any:
        super().log(self._numbered(row))

    def _tell(self, state: str, **more: Any) -> None:
        """Log the state of this job in a run with roles, also while the run ends."""
        if not self._speaks:
            return
        waiting = self._next_row.take() if self.request.plan.role else {}
        own = {f"roles/{roles.name_of(self.request)}/{key}": value for key, value in {"state": state, **more}.items()}
        self.kind.log(self.run, self._numbered({**waiting, **own}), None, True)

    def _numbered(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with its number, if this run's rows have numbers."""
        column = self._outbox.column
        return dict(row) if column is None else {**row, column: next(self._outbox.numbers)}

    def _define_step(self) -> None:
        if self.request.plan.role is None:  # that of roles is defined
            self.run.define_metric("*", step_metric=self.request.config.step_metric)

    def prefixed(self, name: Any) -> Any:
        """Return a name of the function's with the prefix of its keys, or a mapping of such names."""
        if isinstance(name, Mapping):
            return {self.prefixed(key): value for key, value in name.items()}
        return self.prefix + name if isinstance(name, str) and not name.startswith(("_", self.prefix or "_")) else name

    # What else the function does with the run

    def use(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "define_metric" and self.request.plan.role is not None:
            # Of the role's own columns: "*" would be the owner's too.
            names = {**dict(zip(("name", "step_metric"), args, strict=False)), **kwargs}
            named = {key: self.prefixed(names.pop(key)) for key in ("name", "step_metric") if key in names}
            return super().use(method, *[*named.values(), *args[2:]], **names)
        if method.__name__ != "step":
            return super().use(method, *args, **kwargs)
        try:
            step = super().use(method)
        except Exception:  # W&B's shared mode has none
            step = None
        return self._rows.logged if step is None else step

    def change_summary(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.request.plan.role is None:
            return super().change_summary(method, *args, **kwargs)
        if method.__name__ == "keys":
            keys = super().change_summary(method)
            return [key.removeprefix(self.prefix) for key in keys if key.startswith(self.prefix)]
        name, *values = args or (kwargs.pop("key", None),)
        return super().change_summary(method, self.prefixed(name), *values, **kwargs)

    def change_config(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Let only the primary change the config. wandb's own keys begin with _."""
        request, (change, *value) = self.request, [*args, *kwargs.values()]
        if isinstance(change, str):
            changes: Mapping[str, Any] = {change: next(iter(value), None)}
        else:  # W&B takes parsed arguments too
            changes = change if isinstance(change, Mapping) else vars(change)
        is_wandbs = all(str(key).startswith("_") for key in changes)
        if request.plan.role is not None and not is_wandbs:
            section = dict(self.run.config).get(request.plan.role, {})
            section = {**changes, **section} if method.__name__ == "setdefaults" else {**section, **changes}
            super().use(vendor.update_config, {request.plan.role: section})
            return self._show_config()
        if request.plan.primary or is_wandbs:
            return super().change_config(method, *args, **kwargs)
        if request.info is not None:
            raise ConfigError(
                f"rank {request.info.rank} cannot change the config of its shared run, which is the primary's: change "
                f"it on {request.primary_name}, or pass config= to tracking_init"
            )
        # A task that continues its caller's run must not fail because of a change of the config.
        text = (
            "W&B: run %s belongs to the task that has called this one: this task's changes of its config are not sent"
        )
        self.warn_once("config", f"{text}. Change it in the calling task.", self.id)
        return vendor.set_config(self.run, changes)

    def _show_config(self) -> None:
        """Show the function the config that it would have alone. W&B does not get it so.

        That of a role is at the top, over the owner's; that of another rank, or of a called task, is the primary's.
        """
        request, role = self.request, self.request.plan.role
        if role is not None:
            section = dict(self.run.config).get(role, {})
            vendor.set_config(self.run, {key: value for key, value in section.items() if key != role})
        elif not request.plan.primary:
            vendor.set_config(self.run, request.config.config if request.info is None else config_of(request))

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        super().record_event(name, {} if self.request.plan.role else values, text)
        if self.request.plan.role:  # a row is kept, even if W&B keeps one writer's summary only
            self._next_row.add(values)

    def forget_event(self, name: str, keys: Sequence[str]) -> None:  # noqa: ARG002 its file stays
        """Overwrite the values: a service that merges the summaries of writers keeps what one of them only removes."""
        with suppress(Exception):  # its wandb-core may have died, or it is disabled
            self.run.summary.update(dict.fromkeys(set(keys).intersection(self.run.summary.keys()), ""))

    # The end

    def await_writers(self, exit_code: int) -> None:
        self._rows.commit(self._log_row)
        super().await_writers(exit_code)

    def _before_end(self, exit_code: int) -> None:
        self._tell(status_of(exit_code), exit_code=exit_code)
        super()._before_end(exit_code)

    def _end(self, exit_code: int) -> None:
        super()._end(exit_code)
        role = self.request.plan.role
        if role is not None and self._speaks and not (self._is_incomplete or self.run.offline):
            roles.end_again(Place.of(self.run), role, waits=exit_code not in (INTERRUPTED, TERMINATED))


def config_of(request: RunRequest) -> dict[str, Any]:
    """Return the run's config, as the primary passes it: `config=` may be a file of W&B's."""
    given = request.config.config
    return {**(vendor.parse_config(given) if isinstance(given, str) else {}), **run_config(request)}
