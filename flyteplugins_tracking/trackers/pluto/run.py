"""One rank's Pluto run: opened and ended within deadlines, with a queue and an uploader of its own.

Ranks that share the vendor's queue lose rows when the rank that owns it ends; see `_pluto_uploader` for the uploader.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flyteplugins_tracking._runs.close import in_time
from flyteplugins_tracking.errors import ConfigError, TrackerUnavailableError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, prefix_of, run_config
from flyteplugins_tracking.trackers.journal import Journal, how_to_send
from flyteplugins_tracking.trackers.pluto.uploader import POST, unsent
from flyteplugins_tracking.trackers.rows import Values

logger = logging.getLogger(__name__)

_TITLE = "Pluto"
_CHECK = (
    "Check PLUTO_API_KEY, the PLUTO_URL_* variables and the network; or go on in local files with "
    "if_unavailable='degrade'."
)
# How often the service is asked whether it is there, and has the run.
_ASKING_S = 0.1
# What a request may take; the vendor's 32 s are longer than a run's end waits.
_REQUEST_S = 10
# How long nobody listens at the service's address, or the key is refused, before that is taken for true.
_HOPELESS_S = 3.0
# What an answer says, and whether it will say so again.
_READINGS = {
    401: ("the API key is refused", True),
    403: ("the API key is refused", True),
    404: ("the primary rank has not created the run", False),
}
# What is left of a run's end for telling its status, when the rows have been sent.
_STATUS_S = 2.0
# What op.finish takes, by the codes of processes. It has none for other failures, and says TERMINATED for 2 and 15.
_CODES = {0: 0, 130: 2, 143: 15}
# What the queue calls what it holds: pluto.sync.store.RecordType.
_METRIC = 0
_SYSTEM = 5
_OF_A_FILE = (
    *("local_path", "file_name", "file_ext", "file_type", "file_size", "log_name", "timestamp_ms"),
    *("step", "caption", "annotations", "sample_index"),
)
# Larger ones are no JSON numbers to the service.
_LARGEST_INT = 2**63
# The last step that each run's rows have here: where several ranks' files are sent, they share it.
_last_steps: dict[str, int] = {}


def open_run(request: RunRequest, tracker: Tracker) -> PlutoHandle:
    """Open the run, or attach to it.

    Raises:
        TrackerUnavailableError: There is no server, no key, or no answer in time.
    """
    return PlutoHandle(request, tracker, *_open(request))


def _open(request: RunRequest) -> tuple[Any, Uploader | None]:
    settings = _settings(request)
    if settings.mode == "noop":
        settings.disable_system_metrics = True  # its monitor cannot do without a server
        return _init(request, settings), None
    try:
        _authenticate(settings, request)
        _await_service(settings, request)
        os.makedirs(settings.dir, exist_ok=True)
        op = _in_time(request, settings)
        try:
            return op, _complete(op, request)
        except BaseException:
            type(op).close(op)
            raise
    except BaseException as error:
        _remove(settings.dir)
        if isinstance(error, OSError):
            raise TrackerUnavailableError(
                f"Pluto cannot write its local files: {error}. Make room there, or set PLUTO_DIR to another directory."
            ) from error
        raise


def _remove(directory: str) -> None:
    """Remove a run's own directory, and the one around it if that is the last."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(directory))


class PlutoHandle(ClientHandle):
    """An open run of this process."""

    def __init__(self, request: RunRequest, tracker: Tracker, op: Any, uploader: Uploader | None) -> None:
        super().__init__(request, _TITLE, PlutoValues(_TITLE, prefix_of(request)))
        self.run = op
        self._tracker = tracker
        self._uploader = uploader
        self._kept: str | None = None
        self._steps = _Steps(request, self.id)
        self._take_over(op)

    @property
    def url(self) -> str | None:
        """See `Handle.url`."""
        address: str | None = self.run.settings.url_view
        return address

    def summary(self) -> Mapping[str, Any]:
        """See `Handle.summary`."""
        return dict(self.run._latest_metrics)

    def unsent(self) -> Sequence[str]:
        """See `Handle.unsent`."""
        return [] if self._kept is None else [self._kept]

    def how_to_send(self, directory: str) -> str:
        """See `Handle.how_to_send`."""
        return how_to_send(directory)

    def write(self, row: Mapping[str, Any], step: Any, **more: Any) -> None:
        """See `ClientHandle.write`."""
        if self._uploader is not None:
            self._uploader.revive()
        if row:
            self._vendor("log")(dict(row), step=self._steps.of(step, self._values), **more)

    def replay(self, row: Mapping[str, Any], step: Any, time_s: float) -> None:
        """See `ClientHandle.replay`."""
        with self._lock:
            self.write(row, step, timestamp=time_s)

    def end(self, exit_code: int) -> None:
        """See `ClientHandle.end`."""
        ending = _Ending(self.run, self._uploader, _CODES.get(exit_code, 1) if self.ends_run else None, self.request)
        in_time(self.request.config.finish_timeout_s, ending.run)
        if self._uploader is None or not ending.give_up():
            return
        left = self._uploader.stop(0)
        self._keep(exit_code)
        logger.warning(
            "Pluto: run %s has ended, and the service has not taken %s within finish_timeout_s=%g. Send it when it is "
            "there: %s",
            self.id,
            f"{left} rows" if left else "its status",
            self.request.config.finish_timeout_s,
            how_to_send(self._kept or ""),
        )

    def resume(self) -> None:
        """See `ClientHandle.resume`."""
        # The primary has told the end, mostly, and a rank that attaches has the service say again that the run goes on.
        self.ends_run = self.request.plan.primary or self.request.info is not None
        config = replace(self.request.config, name=None)
        key = self.run.settings._auth
        deadline = time.monotonic() + _REQUEST_S
        request = replace(self.request, config=config, deadline=deadline, read_secret=lambda: key)
        reopened, self._uploader = _open(request)
        vars(self.run).update(vars(reopened))
        self._take_over(self.run)

    def _take_over(self, op: Any) -> None:
        """Have what is called on the vendor's object come here, where that would end the run or write to it."""
        import pluto

        op.log = self._log
        op.finish = op.close = _do_nothing
        op._send_kept = functools.partial(_enqueue, op._sync_manager)
        op._send_kept_file = functools.partial(_enqueue_file, op._sync_manager)
        if not self.request.plan.primary:
            for name in ("update_config", "add_tags", "remove_tags"):
                setattr(op, name, functools.partial(self._leave_to_primary, name))
        pluto.log = op.log

    def _log(self, data: Any, step: Any = None, commit: Any = None, timestamp: Any = None) -> None:  # noqa: ARG002
        """The run's `log`. The vendor's own does nothing with `commit`."""
        self.log(data, step, **({} if timestamp is None else {"timestamp": timestamp}))

    def _vendor(self, name: str) -> Callable[..., Any]:
        """The vendor's own method of the run."""
        return functools.partial(getattr(type(self.run), name), self.run)

    def _leave_to_primary(self, name: str, *_: Any, **__: Any) -> None:
        if self.request.info is not None:
            raise ConfigError(f"{name}() is for the run's primary rank: the service would lose what another rank says")
        self._values.tell(f"{name}()", "the run is the calling task's: what this task says is not sent")

    def _keep(self, exit_code: int) -> None:
        """Write what is left in the queue to files that can be sent from any place."""
        assert self._uploader is not None
        journal, files = Journal(self.request, self._tracker, self.id), self._uploader.left_files()
        for kind, payload, time_ms, step in self._uploader.left():
            if kind == _METRIC:
                journal.row(payload, step, time_ms / 1000)
            elif kind != _SYSTEM and payload.get("data_type") != POST:
                journal.call("_send_kept", (kind, payload, time_ms, step), {})
        for file in files:
            journal.call("_send_kept_file", (), file)
        journal.end(exit_code)
        if not files:
            _remove(self.run.settings.dir)
        self._kept = journal.directory


class PlutoValues(Values):
    """A rank's rows: what Pluto's client drops without a word is said."""

    def __init__(self, title: str, prefix: str) -> None:
        super().__init__(title, prefix, odd_floats="stored, and left out of Pluto's charts and statistics")

    def of(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """See `Values.of`."""
        row = super().of(data)
        return {key: plain for key, value in row.items() if (plain := self._taken(key, value)) is not None}

    def _taken(self, key: str, value: Any) -> Any:
        if not (key.isascii() and key.isprintable()):
            self.tell(key, "Pluto has '-' for each character of a key that is not printable ASCII")
        if isinstance(value, int) and abs(value) >= _LARGEST_INT:
            return float(value)
        if isinstance(value, (int, float)):
            return value
        from pluto import Data, File

        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(isinstance(item, (int, float)) for item in items):
            self.tell(key, "of a list, Pluto keeps the last number only")
        if items and all(isinstance(item, (int, float, str, File, Data)) for item in items):
            return value
        self.tell(key, f"a {type(value).__name__} is no number, text or media of Pluto's: it is left out")
        return None


class _Steps:
    """The steps of rows that are logged without one.

    The service's charts have one value for a key and a step, the latest. So these go on where an earlier attempt has
    stopped, and where ranks share a run without a prefix, theirs are between each other's.
    """

    def __init__(self, request: RunRequest, run_id: str) -> None:
        info, config = request.info, request.config
        is_interleaved = info is not None and config.run_mode == "shared" and not config.rank_prefix
        self._run_id = run_id
        self._stride = (request.plan.writers or 1) if is_interleaved else 1
        place = (info.local_rank if config.rank_scope == "worker" else info.rank) if info is not None else 0
        self._place = (place or 0) % self._stride

    def of(self, step: Any, values: Values) -> int:
        if step is not None:
            given = _whole(step)
            if given is not None:
                _last_steps[self._run_id] = max(given, _last_steps.get(self._run_id, 0))
                return given
            values.tell(f"step={step!r}", "Pluto's steps are whole numbers from 0 on: the next one is taken")
        last = _last_steps.get(self._run_id, 0)
        following = (last // self._stride + 1) * self._stride + self._place
        _last_steps[self._run_id] = following
        return following


def _whole(step: Any) -> int | None:
    try:
        whole = int(step)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole == step and 0 <= whole < 2**63 else None


class Uploader:
    """The process that sends a run's queue, and the queue."""

    def __init__(self, database: str, settings: Mapping[str, Any], stderr: int) -> None:
        self._database = database
        self._settings = json.dumps(settings, default=str)
        self._stderr = stderr
        self._process = self._start()
        self._started = time.monotonic()

    def _start(self) -> subprocess.Popen[bytes]:
        # Below the user's modules, where this process finds the same. The key is in neither the command nor a variable.
        # Before them is the standard library, whose modules this process has had before the user's came to the path.
        own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        own |= {os.path.join(directory, "lib-dynload") for directory in own}
        entries = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]  # as Python's own search
        path = os.pathsep.join(sorted(entries, key=lambda entry: entry not in own))
        process = subprocess.Popen(  # noqa: S603 our own
            [sys.executable, "-m", "flyteplugins_tracking.trackers.pluto.uploader", self._database, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # so that a launcher's signals to the job's processes do not end it
        )
        self._tell(process, self._settings)
        return process

    def _tell(self, process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def revive(self) -> None:
        """Start it again, if it has been killed."""
        if self._process.poll() is not None and time.monotonic() - self._started > _REQUEST_S:
            self._started = time.monotonic()
            self._process = self._start()

    def stop(self, timeout_s: float) -> int:
        """Have it send all, within `timeout_s` seconds. Tells how much is left."""
        if timeout_s > 0 and self._process.poll() not in (None, 0):
            self._process = self._start()
        self._tell(self._process, "end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        return self._count()

    def close(self) -> None:
        """Give back what is open."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(OSError):
            os.close(self._stderr)
        self._stderr = subprocess.DEVNULL

    def _count(self) -> int:
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return unsent(connection)

    def left(self) -> list[tuple[int, Any, int, int | None]]:
        """What is not sent: kind, payload, time in ms, step."""
        query = "SELECT record_type, payload_json, timestamp_ms, step FROM sync_queue WHERE status != 2 ORDER BY id"
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return [(kind, json.loads(text), at, step) for kind, text, at, step in connection.execute(query)]

    def left_files(self) -> list[dict[str, Any]]:
        """The files that are not sent, as the queue takes them."""
        query = f"SELECT {', '.join(_OF_A_FILE)} FROM file_uploads WHERE status NOT IN (2, 4) ORDER BY id"  # noqa: S608
        with contextlib.closing(sqlite3.connect(self._database)) as connection:
            return [dict(zip(_OF_A_FILE, row, strict=True)) for row in connection.execute(query)]


class _Ending:
    """The end of a run, in a thread that may be given up."""

    def __init__(self, op: Any, uploader: Uploader | None, code: int | None, request: RunRequest) -> None:
        """`code` is what the service is told, None for nothing."""
        self._op, self._uploader, self._code, self._request = op, uploader, code, request
        self._end = time.monotonic() + request.config.finish_timeout_s
        self._decided = threading.Lock()  # taken once: by what is complete, or by who gives it up

    def run(self) -> None:
        op = self._op
        left = self._send() if self._uploader is not None else 0
        if self._code is None:
            type(op).close(op)
        else:  # also where something is left, which may be a row that the service refuses
            type(op).finish(op, self._code)
        is_complete = not left and op._status_update_error is None and self._decided.acquire(blocking=False)
        if is_complete and self._uploader is not None:
            self._uploader.close()
            _remove(op.settings.dir)

    def give_up(self) -> bool:
        """Whether it is not complete, and is given up now."""
        return self._decided.acquire(blocking=False)

    def _send(self) -> int:
        op = self._op
        if not op.settings.disable_console:
            _stop_console()
        op.settings.x_thread_join_timeout_seconds = 1
        op._monitor._stop_event.set()
        op._queue.put(({}, 0, None))  # wakes a thread of its that asks once a second
        op._monitor.stop(self._code or 0)
        manager, op._sync_manager, op._monitor.op._sync_manager = op._sync_manager, None, None
        assert self._uploader is not None
        spare_s = min(_STATUS_S, self._request.config.finish_timeout_s / 4)
        left = self._uploader.stop(self._end - time.monotonic() - spare_s)
        manager.close()
        return left


def _settings(request: RunRequest) -> Any:
    """The vendor's settings: its variables, the user's, and ours."""
    import pluto
    from pluto.util import get_char

    options = request.config.options
    settings = pluto.setup(dict(options.get("settings") or {}))
    base = os.path.abspath(os.path.expanduser(os.fspath(options.get("dir") or settings.dir)))
    info = request.info
    rank, attempt = (info.rank, info.restart_count) if info else (0, 0)
    own = f"{request.plan.run_id}-rank-{rank}-attempt-{attempt}-{secrets.token_hex(3)}"
    settings.dir = os.path.join(base, ".pluto", own)
    if request.config.project:
        settings.project = get_char(request.config.project)
    if not request.plan.primary and "x_log_level" not in (options.get("settings") or {}):
        settings.x_log_level = max(logging.WARNING, settings.x_log_level)  # where the run is, one rank tells
    settings.compat = dict(settings.compat)
    settings.meta = []
    settings.x_sigterm_status_enabled = False  # the lifecycle tells the status
    settings.x_file_stream_timeout_seconds = min(
        settings.x_file_stream_timeout_seconds, max(1.0, request.deadline - time.monotonic()), _REQUEST_S
    )
    return settings


def _authenticate(settings: Any, request: RunRequest) -> None:
    """Find the key: the user's secret, a variable, or what `pluto login` has stored.

    The vendor's own login would write it to a file, on each rank, and ask for one where nobody sits.
    """
    key = request.read_secret() or settings._auth or _stored_key()
    if not key and not request.may_prompt:
        raise TrackerUnavailableError(
            "Pluto: there is no API key for this process. Run `pluto login`, set PLUTO_API_KEY, or pass secret= to "
            "tracking_init (under flytekit, secret_requests= to the task too); or go on in local files with "
            "if_unavailable='degrade'."
        )
    if not key:
        return
    key = key.strip()  # a trailing line end would be refused, with the key in the text
    if not key.isascii() or not key.isprintable() or " " in key:
        raise TrackerUnavailableError("Pluto: the API key has characters that no key has. Check where it comes from.")
    settings._auth = key
    settings._flyteplugins_key_known = True
    _skip_login_for_known_keys()


def _skip_login_for_known_keys() -> None:
    import pluto.op

    vendors = pluto.op.login
    if getattr(vendors, "_is_flyteplugins", False):
        return

    def login(settings: Any = None, retry: bool = False) -> Any:
        return None if getattr(settings, "_flyteplugins_key_known", False) else vendors(settings, retry)

    login._is_flyteplugins = True  # type: ignore[attr-defined]
    pluto.op.login = login


def _stored_key() -> str | None:
    """What `pluto login` has stored."""
    try:
        if sys.platform == "darwin":
            import keyring

            return keyring.get_password("pluto", "pluto")
        from keyrings.alt.file import PlaintextKeyring

        key: str | None = PlaintextKeyring().get_password("pluto", "pluto")
    except Exception:  # no backend, or an unreadable file: there is none
        return None
    return key


def _client(settings: Any) -> Any:
    import httpx

    proxy = settings.http_proxy or settings.https_proxy or None
    return httpx.Client(verify=not settings.insecure_disable_ssl, proxy=proxy)


def _headers(settings: Any) -> dict[str, str]:
    return {
        "Authorization": f"Bearer {settings._auth}",
        "Content-Type": "application/json",
        "X-Run-Id": str(settings._op_id),
        "X-Run-Name": str(settings._op_name),
        "X-Project-Name": settings.project,
    }


def _await_service(settings: Any, request: RunRequest) -> None:
    """Wait until the service answers; on other ranks, until the primary one has created the run: the first names it.

    Raises:
        TrackerUnavailableError: It does not, or refuses the key.
    """
    body = {"externalId": request.plan.run_id, "projectName": settings.project}
    why, hopeless_since = "no answer", None
    with _client(settings) as client:
        while (left_s := request.deadline - time.monotonic()) > 0:
            try:
                answer = client.post(settings.url_resume, json=body, headers=_headers(settings), timeout=left_s)
            except Exception as error:
                why, is_hopeless = f"{type(error).__name__}: {error}", type(error).__name__ == "ConnectError"
            else:
                if answer.status_code < 300 or (request.plan.primary and answer.status_code == 404):
                    return
                why, is_hopeless = _READINGS.get(answer.status_code, (f"HTTP {answer.status_code}", False))
            hopeless_since = (hopeless_since or time.monotonic()) if is_hopeless else None
            if hopeless_since is not None and time.monotonic() - hopeless_since > _HOPELESS_S:
                break
            time.sleep(min(_ASKING_S, max(0.0, left_s)))
    raise TrackerUnavailableError(
        f"Pluto cannot be used: {why}, at {settings.url_api} within init_timeout_s="
        f"{request.config.init_timeout_s:g}. {_CHECK}"
    )


def _in_time(request: RunRequest, settings: Any) -> Any:
    """What `_init` gives, before the deadline. What comes later is closed.

    Raises:
        TrackerUnavailableError: It does not come.
    """
    outcome: dict[str, Any] = {}
    given_up = threading.Lock()  # taken once, by the one who is first

    def init() -> None:
        try:
            op = _init(request, settings)
        except BaseException as error:  # for the thread that waits
            outcome["error"] = error
            return
        outcome["op"] = op
        if not given_up.acquire(blocking=False):
            is_failure = request.plan.primary and request.config.if_unavailable == "raise"
            type(op).finish(op, 1) if is_failure else type(op).close(op)
            _remove(settings.dir)

    thread = threading.Thread(target=init, daemon=True)
    thread.start()
    thread.join(max(0.0, request.deadline - time.monotonic()))
    if "error" in outcome:
        raise _named(outcome["error"])
    if "op" not in outcome and given_up.acquire(blocking=False):
        raise TrackerUnavailableError(
            f"Pluto cannot be used: {settings.url_api} has not answered within "
            f"init_timeout_s={request.config.init_timeout_s:g}. {_CHECK}"
        )
    thread.join()
    return outcome["op"]


def _named(error: BaseException) -> BaseException:
    """What `pluto.init` has raised, as what it is: it has RuntimeErrors for what the service says."""
    if not isinstance(error, (RuntimeError, ConnectionError)):
        return error
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    unavailable = TrackerUnavailableError(f"Pluto cannot be used: {cause}. {_CHECK}")
    unavailable.__cause__ = error
    return unavailable


def _init(request: RunRequest, settings: Any) -> Any:
    """Call `pluto.init`, without the queue, the console and the metrics of the system: `_complete` sees to these."""
    import pluto

    settings._flyteplugins_asked = settings.disable_console, settings.disable_system_metrics
    is_noop = settings.mode == "noop"
    if not is_noop:
        settings.sync_process_enabled, settings.disable_console, settings.disable_system_metrics = False, True, True
        settings._sys = _System(settings) if request.plan.primary or _measures(request) else _NoSystem()
        if request.plan.primary:
            settings.compat["systemMetadata"] = settings._sys.get_info()
    options = request.config.options
    arguments = {name: value for name, value in options.items() if name in _PASSED_ON and value is not None}
    with _without_telemetry(), _without_warning_of_names():
        op = pluto.init(
            dir=settings.dir,
            settings=settings,
            run_id=request.plan.run_id,
            resume=True,
            **(_metadata(request) if request.plan.primary else {"name": request.plan.run_id}),
            **arguments,
        )
    atexit.unregister(op.finish)
    return op


_PASSED_ON = ("fork_run_id", "fork_step", "inherit_config", "inherit_tags")


def _metadata(request: RunRequest) -> dict[str, Any]:
    """What the primary alone passes."""
    config, plan = request.config, request.plan
    tags, group = list(config.tags or ()), config.group or plan.group
    if group and not any(tag.startswith("group:") for tag in tags):  # the service takes one
        tags.append(f"group:{group}")
    return {"name": config.name or plan.run_id, "config": run_config(request), "tags": tags}


class _NoSystem:
    """In place of `pluto.System`, which takes half a second, where nothing of it is wanted."""

    def get_info(self) -> dict[str, Any]:
        return {}

    def monitor(self) -> dict[str, Any]:
        return {}


def _System(settings: Any) -> Any:  # noqa: N802 a class of the vendor's
    from pluto import System

    return System(settings)


def _measures(request: RunRequest) -> bool:
    """Whether this rank sends the metrics of the system: one of each node does."""
    info = request.info
    if info is None:
        return request.plan.primary
    return info.rank == 0 if info.local_rank is None else info.local_rank == 0


def _complete(op: Any, request: RunRequest) -> Uploader:
    """Give the run its queue, its uploader, its console and its metrics of the system."""
    settings = op.settings
    disable_console, disable_system = settings._flyteplugins_asked
    stderr = os.dup(2)  # before the console is captured: what the uploader says is no line of the run's
    settings.sync_process_enabled = op._use_sync_process = True
    settings.sync_process_db_path = os.path.join(settings.dir, "sync.db")
    op._init_sync_manager()
    manager = op._sync_manager
    manager._started = True
    manager.store.heartbeat = _do_nothing  # for the vendor's uploader: a write with each row
    names = {name: value for name, value in manager.settings.items() if name != "_config"}
    names.update(
        finish_timeout_s=request.config.finish_timeout_s,
        sync_process_batch_size=max(1000, settings.sync_process_batch_size),
    )
    uploader = Uploader(manager.db_path, names, stderr)
    op._iface._update_meta = functools.partial(_register, op)
    if not request.plan.primary or op.resumed:
        _go_on_with_steps(settings, request)
    _say_what_is_ignored(op, request)
    _post_notes(op, request)
    if not disable_system and _measures(request):
        _measure(op)
    if not disable_console:
        _capture_console(op)
    return uploader


def _register(op: Any, num: Sequence[str] | None = None, df: Mapping[str, Sequence[str]] | None = None) -> None:
    """Register keys through the queue: the vendor would have the step wait for the service."""
    for kind, names in [("METRIC", num), *((name.upper(), of_kind) for name, of_kind in (df or {}).items())]:
        if names:
            body = {"runId": op.settings._op_id, "logType": kind, "logName": list(names)}
            _post(op, op.settings.url_meta, body)


def _post(op: Any, url: str, body: Mapping[str, Any]) -> None:
    """Have the uploader post this."""
    if op._sync_manager is not None:
        op._sync_manager.enqueue_data(url, POST, dict(body), int(time.time() * 1000))


def _post_notes(op: Any, request: RunRequest) -> None:
    """The client has no call for them, and the service does."""
    if request.plan.primary and request.config.notes is not None:
        url = f"{op.settings.url_api}/api/runs/notes/update"
        _post(op, url, {"runId": op.settings._op_id, "notes": request.config.notes[:1000]})


def _go_on_with_steps(settings: Any, request: RunRequest) -> None:
    """Ask for the last step of a run that was there: rows with its steps again would take those rows' place."""
    timeout_s = min(_REQUEST_S / 2, request.deadline - time.monotonic())
    run_id = str(request.plan.run_id)
    if _last_steps.get(run_id) or timeout_s <= 0:
        return
    try:
        with _client(settings) as client:
            answer = client.post(f"{settings.url_ingest}/step", headers=_headers(settings), timeout=timeout_s)
        _last_steps[run_id] = int(answer.json()["step"])
    except Exception as error:
        logger.warning(
            "Pluto: the last step of run %s cannot be asked for (%s): rows that are logged without step= may take the "
            "place of an earlier attempt's in charts",
            run_id,
            type(error).__name__,
        )


def _say_what_is_ignored(op: Any, request: RunRequest) -> None:
    name = request.config.name
    if request.plan.primary and op.resumed and name is not None and not request.is_retry:
        logger.warning(
            "Pluto: name=%r is ignored where run %s has been there under another: it keeps its name and tags",
            name,
            request.plan.run_id,
        )


def _measure(op: Any) -> None:
    from pluto.api import make_compat_monitor_v1

    metrics = make_compat_monitor_v1(op.settings._sys.monitor())
    _register(op, num=list(metrics))
    op._sync_manager.enqueue_system_metrics(metrics, int(time.time() * 1000))
    op.settings.disable_system_metrics = False  # its monitor goes on


def _capture_console(op: Any) -> None:
    from pluto.log import setup_logger

    op.settings.disable_console = False
    setup_logger(op.settings, logging.getLogger("pluto"), logging.getLogger("console"), op._sync_manager)


def _stop_console() -> None:
    from pluto.log import flush_console_buffers

    flush_console_buffers()


def _enqueue(manager: Any, kind: int, payload: Any, time_ms: int, step: int | None) -> None:
    """Put back into the queue what was kept of an earlier one."""
    from pluto.sync.store import RecordType

    if manager is not None:
        manager.store.enqueue(manager.run_id, RecordType(kind), payload, time_ms, step)


def _enqueue_file(manager: Any, **file: Any) -> None:
    """As `_enqueue`, for a file, which is where the run has put it."""
    if manager is not None and os.path.exists(file["local_path"]):
        manager.enqueue_file(**file)
    else:
        logger.warning("Pluto: %s is not sent: it is on the machine of the run", file["local_path"])


def _do_nothing(*_: Any, **__: Any) -> None:
    """The run ends when the decorated function does."""


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """The client's reports on itself hold up a process's end where there is no network. A variable asks for them."""
    name = "PLUTO_DISABLE_TELEMETRY"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _without_warning_of_names() -> Iterator[None]:
    """The vendor warns each rank that attaches that its name is ignored, where it has passed none."""

    def is_kept(record: logging.LogRecord) -> bool:
        return "`name` parameter" not in str(record.msg)

    vendors = logging.getLogger("pluto")
    vendors.addFilter(is_kept)
    try:
        yield
    finally:
        vendors.removeFilter(is_kept)
