"""A tracker that keeps its runs in memory, for assertions in tests."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload
from unittest.mock import MagicMock

from flyteplugins_tracking._util.proc import INTERRUPTED, TERMINATED
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, prefix_of, run_config, status_of
from flyteplugins_tracking.trackers.client import Run as ClientRun
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.rows import MetricSanitizer, RowBuffer

Status = Literal["running", "finished", "failed", "killed", "preempted"]


@dataclass(frozen=True)
class Row:
    """The row of one call of `log`.

    Attributes:
        values: The values by key.
        step: The `step=` of the call.
        rank: The rank that logged it; 0 outside a distributed job.
        attempt: The number of restarts before it.
    """

    values: Mapping[str, Any]
    step: Any = None
    rank: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class MethodCall:
    """A call of a method of the run that the recording does not interpret, such as `log_artifact`.

    Attributes:
        name: The method's name.
        args: The positional arguments.
        kwargs: The keyword arguments.
        rank: The rank that called it.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True)
class RecordedRun:
    """One run, as the tracker would have it.

    Attributes:
        id: The run's id.
        tracker: The name of its tracker.
        ranks: The ranks that opened it, sorted; rank 0 outside a distributed job.
        primary: The rank whose end is the run's end; None if that rank did not open it.
        rows: The logged rows, in the order of the calls.
        config: The run's config, with the library's additions.
        summary: The last value of each key, and the values that were set in `summary`.
        name: The run's name.
        project: The run's project.
        group: The run's group.
        tags: The run's tags.
        notes: The run's notes.
        attempts: How often it was opened: once, and once more for each restart and each later call with the same id.
        exit_codes: The exit code of each end.
        calls: The calls of other methods, of one rank after the other.
        texts: By "failure", why its job has failed, with the traceback; by "hang", where its ranks were.
    """

    id: str
    tracker: str = "wandb"
    ranks: tuple[int, ...] = ()
    primary: int | None = None
    rows: tuple[Row, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    attempts: int = 1
    exit_codes: tuple[int, ...] = ()
    calls: tuple[MethodCall, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int | None:
        """The exit code of its last end; None while it is open."""
        return self.exit_codes[-1] if len(self.exit_codes) >= self.attempts else None

    @property
    def status(self) -> Status:
        """Its status by exit code, as its tracker shows it.

        "finished" for 0, "running" while it is open, else "failed"; after SIGTERM (143) "preempted" with W&B, and
        "killed" with another tracker; after Ctrl-C (130) "failed" with W&B, and "killed" with another tracker.
        """
        names: dict[int | None, Status] = {None: "running", 0: "finished"}
        names |= {TERMINATED: "preempted"} if self.tracker == "wandb" else {INTERRUPTED: "killed", TERMINATED: "killed"}
        return names.get(self.exit_code, "failed")

    def logged(self, key: str, rank: int | None = None) -> tuple[Any, ...]:
        """Return the values that were logged under `key`, in the order of the calls.

        Args:
            key: The key, with its prefix if it has one.
            rank: The rank that logged them; None for all ranks.
        """
        return tuple(row.values[key] for row in self.rows if key in row.values and rank in (None, row.rank))


class RecordedRuns(Sequence[RecordedRun]):
    """The runs by lowest rank, then in the order of opening: `runs[0]`, `runs["their-id"]`, `(run,) = runs`."""

    def __init__(self, read: Callable[[], Sequence[RecordedRun]]) -> None:
        """Create the sequence of the runs that `read` returns at each use."""
        self._read = read

    @overload
    def __getitem__(self, key: int | str) -> RecordedRun: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[RecordedRun]: ...
    def __getitem__(self, key: int | str | slice) -> RecordedRun | Sequence[RecordedRun]:
        """Return the run with this position or id.

        Raises:
            KeyError: No run has that id, or several have.
        """
        runs = self._read()
        if not isinstance(key, str):
            return runs[key]
        matching = [run for run in runs if run.id == key]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise KeyError(f"{len(matching)} runs have the id {key!r}: use of(tracker), or the position")
        raise KeyError(f"no run has the id {key!r}; the ids are {', '.join(self.ids[:20]) or 'none'}")

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[RecordedRun]:
        return iter(self._read())

    def __repr__(self) -> str:
        return repr(list(self))

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the runs."""
        return tuple(run.id for run in self)

    def of(self, tracker: str) -> RecordedRuns:
        """Return the runs of one tracker, if several decorators are stacked."""
        return RecordedRuns(lambda: [run for run in self if run.tracker == tracker])


class RecordingTracker(Tracker):
    """A tracker that keeps its runs in memory. It sends no request and writes no file.

    Example:
        ```python
        recorder = RecordingTracker()


        @tracking_init(tracker=recorder)
        def train(): ...


        train()
        assert recorder.runs[0].status == "finished"
        ```
    """

    name = "recording"
    title = "the recording"
    takes_roles = True

    def __init__(self, instead_of: Tracker | None = None, store: Store | None = None) -> None:
        """Create a tracker. Users pass no arguments.

        Args:
            instead_of: The tracker that this one replaces, under its name.
            store: The store for the runs, which other trackers may share.
        """
        self._store = store or Store()
        if instead_of is not None:
            self.name, self.title = instead_of.name, instead_of.title
            self.run_id_variables, self.arguments = instead_of.run_id_variables, instead_of.arguments
            self.unsupported = instead_of.unsupported

    @property
    def runs(self) -> RecordedRuns:
        """The runs so far."""
        return RecordedRuns(self._store.read)

    def check(self, config: TrackingConfig) -> None:
        """Accept every config."""

    def open(self, request: RunRequest) -> Handle:
        """Open a recorded run, or continue the one with the same id."""
        return _Handle(self, request, self._store)


class Store:
    """The recorded runs, by tracker and id."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _State] = {}
        self._lock = threading.Lock()

    def open(self, tracker: str, run_id: str, rank: int, is_owner: bool) -> _State:
        """Return the run with this id: an existing one, or a new one."""
        with self._lock:
            state = self._runs.setdefault((tracker, run_id), _State(run_id, tracker))
            state.opened[rank] += is_owner
        return state

    def read(self) -> list[RecordedRun]:
        """Return the current runs, sorted by the lowest rank that opened each: threads open theirs in any order."""
        with self._lock:
            states = list(self._runs.values())
        return sorted((state.frozen() for state in states), key=lambda run: run.ranks[0])


class Values(Mapping[str, Any]):
    """A config or a summary, as one rank sees it. Its keys are also attributes."""

    _values: dict[str, Any]
    _refusal: str | None

    def __init__(self, values: dict[str, Any], refusal: str | None = None) -> None:
        """Create a view of `values`. With a `refusal`, changes raise a `ConfigError` that says so."""
        self.__dict__.update(_values=values, _refusal=refusal)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, key: str, value: Any) -> None:
        if self._refusal:
            raise ConfigError(self._refusal)
        self._values[key] = value

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("_values", ()):  # while it is being copied, it has none
            raise AttributeError(name)
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, values: Any = None, allow_val_change: bool | None = None, **items: Any) -> None:  # noqa: ARG002 as W&B's
        """Set several values: of a mapping, or of an object such as an `argparse.Namespace`."""
        values = values if isinstance(values, Mapping) or values is None else vars(values)
        for key, value in {**(values or {}), **items}.items():
            self[key] = value

    def setdefaults(self, values: Mapping[str, Any]) -> None:
        """Set the values whose keys are not set yet."""
        self.update({key: value for key, value in values.items() if key not in self})

    def as_dict(self) -> dict[str, Any]:
        """Return a copy."""
        return dict(self)


@dataclass(eq=False)
class _State:
    """The state of a run while it is recorded."""

    id: str
    tracker: str
    opened: Counter[int] = field(default_factory=Counter)
    primary: Run | None = None
    rows: list[Row] = field(default_factory=list)
    others: list[tuple[int, MagicMock]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def frozen(self) -> RecordedRun:
        head: Any = self.primary
        return RecordedRun(
            self.id,
            self.tracker,
            ranks=tuple(sorted(self.opened)),
            primary=getattr(head, "rank", None),
            rows=tuple(self.rows),
            config=dict(self.config),
            summary=dict(self.summary),
            tags=tuple(getattr(head, "tags", ())),
            attempts=max(1, *self.opened.values()),
            exit_codes=tuple(self.exit_codes),
            calls=tuple(
                MethodCall(name, args, kwargs, rank)
                for rank, others in self.others
                for name, args, kwargs in others.mock_calls
                if "__" not in name  # of a `with` statement
            ),
            texts=dict(self.texts),
            **{name: getattr(head, name, None) for name in ("name", "project", "group", "notes")},
        )


class Run(ClientRun):
    """The object that `get_run` returns, with the usual methods of runs. Calls of other methods are recorded."""

    url = None

    def __init__(self, handle: _Handle, state: _State) -> None:
        super().__init__(handle)
        config = handle.request.config
        earlier: Any = state.primary  # a later attempt keeps what the run has
        self.run_id = handle.id
        self.rank = handle.rank
        self.resumed = state.opened[self.rank] > 1
        self.project = config.project
        self.group = handle.request.group
        self.name = config.name or getattr(earlier, "name", None)
        self.tags = tuple(config.tags or ()) or getattr(earlier, "tags", ())
        self.notes = config.notes or getattr(earlier, "notes", None)
        self.summary = Values(state.summary)
        self.config = Values(state.config)
        # What is called on it has the ways of a mock: `run.log_artifact(...).wait()`, `with run.trace(...):`.
        self._others = MagicMock()
        state.others.append((self.rank, self._others))

    def log(self, data: Mapping[str, Any], step: Any = None, commit: bool | None = None, **_: Any) -> None:
        """Log a row of values by key."""
        self._handle.log(data, step, commit=commit)

    def log_metrics(self, metrics: Mapping[str, Any], step: Any = None, **_: Any) -> None:
        """Log a row, under MLflow's name."""
        self.log(metrics, step)

    def log_metric(self, key: str, value: Any, step: Any = None, **_: Any) -> None:
        """Log a row of one value."""
        self.log({key: value}, step)

    def log_params(self, params: Mapping[str, Any], **_: Any) -> None:
        """Add values to the config, under MLflow's name."""
        self.config.update(params)

    def log_param(self, key: str, value: Any, **_: Any) -> None:
        """Set one value in the config."""
        self.config[key] = value

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._others, name)


def without_run() -> Any:
    """Return what a client's call returns where no run is recorded: it takes all calls, and does nothing."""
    return MagicMock()


class _Handle(ClientHandle):
    """The handle of one rank. Its service is the state of the run, in memory."""

    def __init__(self, tracker: Tracker, request: RunRequest, store: Store) -> None:
        is_shared = request.config.run_mode == "shared" and request.info is not None and tracker.name == "wandb"
        step_metric, role = request.config.step_metric, request.plan.role
        super().__init__(request, tracker.title, _Values(tracker.title, prefix_of(request), step_metric))
        info = request.info
        self.rank, self._attempt = (0, 0) if info is None else (info.rank, info.restart_count)
        self._state = state = store.open(tracker.name, self.id, self.rank, is_owner=role is None)
        self.run = Run(self, state)
        # In W&B's shared runs `step=` becomes a column.
        self._column = step_metric if is_shared else None
        self._rows = RowBuffer(step_metric, "", lambda: None)
        config = copy.deepcopy(run_config(request))  # a copy, since each rank's process would have its own
        if role is not None:  # its section: the others' values are not changed
            self.run.config = Values(state.config.setdefault(role, {}))
            self.run.config.update(config[role])
        elif self.ends_run:
            state.primary = self.run
            state.config.update(config)
        else:
            self.run.config.setdefaults(config)  # the primary may open the run later, with the same config
            if is_shared:
                refusal = f"only the primary may change the config of a shared run: change it on {request.primary_name}"
                self.run.config = Values(state.config, f"{refusal}, or pass config= to tracking_init")

    def write(self, row: Mapping[str, Any], step: Any, commit: bool | None = None, **_: Any) -> None:
        column = self._column
        if column is None:
            self._rows.log(lambda row: self._add(row, step), row, commit=commit)
        else:
            self._rows.log(lambda row: self._add(row, row.get(column)), row, step, commit)

    def _add(self, values: Mapping[str, Any], step: Any) -> None:
        self._state.rows.append(Row(values, step, self.rank, self._attempt))
        self._state.summary.update(values)

    def _before_end(self, exit_code: int) -> None:  # noqa: ARG002 as W&B's
        self._state.summary.update(self._next_row.take())  # no row of its own, which the function has not logged

    def end(self, exit_code: int) -> None:
        self._rows.commit(lambda row: self._add(row, row.get(self._column)))
        role = self.request.plan.role
        if role is not None:
            self._state.summary.update(
                {f"roles/{role}/state": status_of(exit_code), f"roles/{role}/exit_code": exit_code}
            )
        if self.ends_run:
            self._state.exit_codes.append(exit_code)

    def end_early(self, exit_code: int) -> None:
        """Do nothing: functions that joined the run may still use it, and `finish` follows."""

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self._state.summary.update(values)
        self._state.texts[name] = text

    def forget_event(self, name: str, keys: Sequence[str]) -> None:
        for key in keys:
            self._state.summary.pop(key, None)
        self._state.texts.pop(name, None)


class _Values(MetricSanitizer):
    """Keeps each value as it is when it is logged: the training may change it in place."""

    def __init__(self, title: str, prefix: str, step_metric: str) -> None:
        super().__init__(title, prefix)
        self._step_metric = step_metric

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            return super().clean(data)  # it raises, and says why
        own = {key for key in data if key.startswith("_") or key == self._step_metric}
        return {key if key in own else self._prefix + key: _snapshot(value) for key, value in data.items()}


def _snapshot(value: Any) -> Any:
    """Replace tensors and arrays of one element by their number."""
    if isinstance(value, Mapping):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_snapshot(item) for item in value]
    if callable(getattr(value, "item", None)):  # raises if there is more than one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            return value.item()
    return value
