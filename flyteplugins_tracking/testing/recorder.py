"""A tracker that keeps its runs in memory, for assertions in tests."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.client import new_id, prefix_of, refuse_to_pickle, run_config, status_of
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.gate import Gate
from flyteplugins_tracking.trackers.rows import NextRow, OwnersKeys, RowBuffer

Status = Literal["running", "finished", "failed", "killed"]


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
        calls: The calls of other methods.
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
        """Its status by exit code: "finished" for 0, "killed" for 130 (Ctrl-C) and 143 (SIGTERM), else "failed"."""
        names: dict[int | None, Status] = {None: "running", 0: "finished", 130: "killed", 143: "killed"}
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
        return _Handle(self, request, self._store.open(self.name, request))


class Store:
    """The recorded runs, by tracker and id."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], _State] = {}
        self._lock = threading.Lock()

    def open(self, tracker: str, request: RunRequest) -> _State:
        """Return the requested run: an existing one with the same id, or a new one."""
        run_id = request.plan.run_id or new_id()
        with self._lock:
            state = self._runs.setdefault((tracker, run_id), _State(run_id, tracker))
            state.opened[_rank(request)] += request.plan.role is None
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
    calls: list[MethodCall] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def frozen(self) -> RecordedRun:
        head: Any = self.primary
        named = {} if head is None else {name: getattr(head, name) for name in ("name", "project", "group", "notes")}
        return RecordedRun(
            self.id,
            self.tracker,
            ranks=tuple(sorted(self.opened)),
            primary=None if head is None else head.rank,
            rows=tuple(self.rows),
            config=dict(self.config),
            summary=dict(self.summary),
            tags=() if head is None else tuple(head.tags),
            attempts=max(1, *self.opened.values()),
            exit_codes=tuple(self.exit_codes),
            calls=tuple(self.calls),
            texts=dict(self.texts),
            **named,
        )


class Run:
    """The object that `get_run` returns, with the usual methods of runs. Calls of other methods are recorded."""

    def __init__(self, request: RunRequest, state: _State, log: Callable[..., None]) -> None:
        config = request.config
        self.id = self.run_id = state.id
        self.rank = _rank(request)
        self.resumed = state.opened[self.rank] > 1
        self.url = None
        self.project = config.project
        self.group = request.group
        self.name = config.name
        self.tags = tuple(config.tags or ())
        self.notes = config.notes
        self.summary = Values(state.summary)
        self.config = Values(state.config)
        self._calls = state.calls
        self._log = log

    def log(self, data: Mapping[str, Any], step: Any = None, commit: bool | None = None, **_: Any) -> None:
        """Log a row of values by key."""
        self._log(data, step, commit)

    def log_metrics(self, metrics: Mapping[str, Any], step: Any = None, **_: Any) -> None:
        """Log a row, under MLflow's name."""
        self._log(metrics, step, None)

    def log_metric(self, key: str, value: Any, step: Any = None, **_: Any) -> None:
        """Log a row of one value."""
        self._log({key: value}, step, None)

    def log_params(self, params: Mapping[str, Any], **_: Any) -> None:
        """Add values to the config, under MLflow's name."""
        self.config.update(params)

    def log_param(self, key: str, value: Any, **_: Any) -> None:
        """Set one value in the config."""
        self.config[key] = value

    def finish(self, *_: Any, **__: Any) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the run ends when the decorated function does."""

    def __reduce__(self) -> Any:
        refuse_to_pickle()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unknown(self._calls, name, self.rank)


def without_run(name: str) -> Any:
    """Return what a client's call returns where no run is recorded: it takes all calls, and does nothing."""
    return _Unknown([], name, 0)


class _Unknown:
    """An attribute of a run, or of a call's result, whose calls are only recorded."""

    def __init__(self, calls: list[MethodCall], name: str, rank: int) -> None:
        self._calls = calls
        self._name = name
        self._rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> _Unknown:
        self._calls.append(MethodCall(self._name, args, kwargs, self._rank))
        return _Unknown(self._calls, f"{self._name}()", self._rank)

    def __getattr__(self, name: str) -> _Unknown:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unknown(self._calls, f"{self._name}.{name}", self._rank)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing, as in `run.config["lr"] = 0.1`."""

    def __enter__(self) -> _Unknown:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"<{self._name} of a recorded run>"


class _Handle(Handle):
    """The handle of one rank."""

    def __init__(self, tracker: Tracker, request: RunRequest, state: _State) -> None:
        self.id = state.id
        self.run: Any = Run(request, state, self._log)
        self._state = state
        self._ends_run, self._role = request.plan.ends_run, request.plan.role
        self._attempt = request.info.restart_count if request.info is not None else 0
        self._next_row = NextRow()
        self._gate = Gate(tracker.title, state.id, request.watch, lambda: None)
        is_shared = request.config.run_mode == "shared" and request.info is not None and tracker.name == "wandb"
        # In W&B's shared runs `step=` becomes a column.
        self._step_metric = request.config.step_metric if is_shared else None
        self._rows = RowBuffer(request.config.step_metric, prefix_of(request), lambda: None)
        self._owners_keys = OwnersKeys(tracker.title, request.config.roles or ())
        config = copy.deepcopy(run_config(request))  # a copy, since each rank's process would have its own
        if self._role is not None:  # its section: the others' values are not changed
            self.run.config = Values(state.config.setdefault(self._role, {}))
            self.run.config.update(config[self._role])
            return
        if self._ends_run:
            self._describe(config)
            return
        self.run.config.setdefaults(config)  # the primary of a shared run may open it later, with the same config
        if is_shared:
            refusal = f"only the primary may change the config of a shared run: change it on {request.primary_name}"
            self.run.config = Values(state.config, f"{refusal}, or pass config= to tracking_init")

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Set the values that only the primary passes. A later attempt keeps the values of the run."""
        previous, self._state.primary = self._state.primary, self.run
        if previous is not None:
            self.run.name = self.run.name or previous.name
            self.run.tags, self.run.notes = self.run.tags or previous.tags, self.run.notes or previous.notes
        self._state.config.update(config)

    def _log(self, data: Mapping[str, Any], step: Any, commit: bool | None) -> None:
        """Record a row.

        Raises:
            TypeError: `data` is not a mapping of strings to values.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise TypeError(f"log() needs a mapping of strings to values, got {data!r:.100}")
        self._owners_keys.check(data)
        data = _snapshot(data)
        if self._gate.refuses():
            return
        if self._step_metric is not None:
            self._rows.log(lambda row: self._add(row, row.get(self._step_metric)), data, step, commit)
        else:
            self._rows.log(lambda row: self._add(row, step), data, commit=commit)

    def _add(self, values: Mapping[str, Any], step: Any) -> None:
        values = {**self._next_row.take(), **values}
        self._state.rows.append(Row(values, step, self.run.rank, self._attempt))
        self._state.summary.update(values)

    def finish(self, exit_code: int) -> None:
        self._gate.finish(lambda: self._end(exit_code))

    def _end(self, exit_code: int) -> None:
        self._rows.commit(lambda row: self._add(row, row.get(self._step_metric)))
        self._state.summary.update(self._next_row.take())
        if self._role is not None:
            ended = {"state": status_of(exit_code), "exit_code": exit_code}
            self._state.summary.update({f"roles/{self._role}/{key}": value for key, value in ended.items()})
        if self._ends_run:
            self._state.exit_codes.append(exit_code)

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        self._state.summary.update(values)
        self._state.texts[name] = text

    def forget_event(self, name: str, keys: Sequence[str]) -> None:
        for key in keys:
            self._state.summary.pop(key, None)
        self._state.texts.pop(name, None)

    def add_to_next_row(self, values: Mapping[str, Any]) -> None:
        self._next_row.add(values)

    def end_early(self, exit_code: int) -> None:
        """Do nothing: functions that joined the run may still use it, and `finish` follows."""


def _snapshot(value: Any) -> Any:
    """Replace tensors and arrays of one element by their number, since the training may change them in place."""
    if isinstance(value, Mapping):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_snapshot(item) for item in value]
    if callable(getattr(value, "item", None)):  # raises if there is more than one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            return value.item()
    return value


def _rank(request: RunRequest) -> int:
    return 0 if request.info is None else request.info.rank
