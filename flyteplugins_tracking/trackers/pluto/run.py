"""One rank's Pluto run while it is open, and its end within the deadline."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.threads import run_with_timeout
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.base import RunRequest, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle, Status, prefix_of, status_of
from flyteplugins_tracking.trackers.earlier import EarlierAttempts
from flyteplugins_tracking.trackers.outbox import how_to_send
from flyteplugins_tracking.trackers.pluto import vendor
from flyteplugins_tracking.trackers.pluto.open import REQUEST_S, Sending, http_client, open_op
from flyteplugins_tracking.trackers.rows import MetricSanitizer

logger = logging.getLogger(__name__)

_TITLE = "Pluto"
# The part of a run's end that is kept for sending the status, when the rows have been sent.
_STATUS_S = 2.0
# The codes that the client takes: signal numbers for a run that was killed, which the service calls TERMINATED.
_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "killed": 15}
# Larger integers are not JSON numbers to the service.
_LARGEST_INT = 2**63
# The last step of each run's rows in this process. The process that sends several ranks' files has several handles.
_last_steps: dict[str, int] = {}


def open_run(request: RunRequest, tracker: Tracker) -> PlutoHandle:
    """Open the run, or attach to it.

    Raises:
        TrackerUnavailableError: The server does not answer in time, or there is no key for it.
    """
    return PlutoHandle(request, tracker, *open_op(request, tracker))


class PlutoHandle(ClientHandle):
    """An open run of this process."""

    def __init__(self, request: RunRequest, tracker: Tracker, op: Any, sending: Sending | None) -> None:
        super().__init__(request, _TITLE, PlutoSanitizer(_TITLE, prefix_of(request)))
        self.run = op
        self._tracker = tracker
        self._sending = sending
        self._kept: list[str] = []  # the directories of rows that were not sent in time
        self._steps = StepCounter(request, self.id)
        self._take_over(op, request)
        self._send_earlier()

    @property
    def url(self) -> str | None:
        """The run's page."""
        address: str | None = self.run.settings.url_view
        return address

    def summary(self) -> Mapping[str, Any]:
        return vendor.latest_metrics(self.run)

    def unsent(self) -> Sequence[str]:
        return [directory for directory in self._kept if os.path.isdir(directory)]  # the next attempt removes it

    def how_to_send(self, directory: str) -> str:
        return how_to_send(directory, self.request.config.options)

    def record_event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        run_with_timeout(REQUEST_S, self.run.update_config, {**values, f"{name}/text": text})

    def write(self, row: Mapping[str, Any], step: Any, **kwargs: Any) -> None:
        if self._sending is not None:
            self._sending.uploader.revive()
        if row:
            type(self.run).log(self.run, dict(row), step=self._steps.step_of(step, self._values), **kwargs)

    @property
    def last_step(self) -> Any:
        """The step of the last row."""
        return self._steps.last

    def replay(self, row: Mapping[str, Any], step: Any, time_s: float) -> None:
        self.write(row, step, timestamp=time_s)

    def replay_queue(self, directory: str, written_in: str) -> None:
        if self._sending is not None:
            self._sending.queue.take(self.run, directory, written_in)

    def keep_end(self, exit_code: int) -> None:
        if self._sending is not None:
            self._sending.queue.file.end(exit_code)

    def end(self, exit_code: int) -> None:
        code = _CODES[status_of(exit_code)] if self.ends_run else None
        ending = _Ending(self.run, self._sending, code, self.request)
        run_with_timeout(self.request.config.finish_timeout_s, ending.run)
        if self._sending is None or not ending.give_up():
            return
        unsent = self._sending.uploader.stop(0)
        self._sending.queue.keep(exit_code)
        self._kept.append(self._sending.queue.directory)
        logger.warning(
            "Pluto: run %s has ended, and the service has not taken %s within %s. Send it when the service answers: %s",
            self.id,
            f"{unsent} rows" if unsent else "its status",
            self.request.config.finish_limit,
            self.how_to_send(self._sending.queue.directory),
        )

    def resume(self) -> None:
        # The primary has mostly sent the end, and a rank that attaches makes the service say that the run is running.
        self.ends_run = self.request.plan.primary or self.request.info is not None
        config = replace(self.request.config, name=None)
        key = vendor.key_of(self.run.settings)
        deadline = time.monotonic() + REQUEST_S
        request = replace(self.request, config=config, deadline=deadline, read_secret=lambda: key)
        reopened, self._sending = open_op(request, self._tracker)
        vars(self.run).update(vars(reopened))
        self._take_over(self.run, request)
        if self._sending is not None:
            self._sending.queue.adopt(self.run)

    def _send_earlier(self) -> None:
        """Queue what earlier attempts on this machine have left: in queues, and in files while the service was away."""
        if self._sending is None:
            return
        self._sending.queue.adopt(self.run)
        earlier = EarlierAttempts.of(self.request, self._tracker, self.id)
        earlier.relog(self, earlier.lines)
        earlier.log(self.id, self._title)
        earlier.acknowledged()  # the queue is on the disk too

    def _take_over(self, op: Any, request: RunRequest) -> None:
        """Have calls on the client's run object come here if they would end the run or write to it.

        Rows that are logged without a step continue after the run's last one.
        """
        import pluto

        if self._sending is not None and (not request.plan.primary or op.resumed):
            self._steps.continue_run(op.settings, request, self._sending.queue.last_step())

        op.log = self._log
        op.finish = op.close = _do_nothing
        if not self.request.plan.primary:
            for name in ("update_config", "add_tags", "remove_tags"):
                setattr(op, name, functools.partial(self._leave_to_primary, name))
        pluto.log = op.log

    def _log(self, data: Any, step: Any = None, commit: Any = None, timestamp: Any = None) -> None:  # noqa: ARG002
        """Log a row: the `log` of the run object. The client itself does nothing with `commit`."""
        self.log(data, step, **({} if timestamp is None else {"timestamp": timestamp}))

    def _leave_to_primary(self, name: str, *_: Any, **__: Any) -> None:
        if self.request.info is not None:
            raise ConfigError(
                f"{name}() can be called on the run's primary rank only: the service keeps one rank's call"
            )
        self._values.warn_once(f"{name}()", "the run is the calling task's: this call is not sent")


def _do_nothing(*_: Any, **__: Any) -> None:
    """The run ends when the decorated function does."""


class _Ending:
    """The end of a run, in a thread that may be given up."""

    def __init__(self, op: Any, sending: Sending | None, code: int | None, request: RunRequest) -> None:
        """Prepare the end. `code` is the client's code for the service; None to send no status."""
        self._op, self._sending, self._code = op, sending, code
        self._timeout_s = request.config.finish_timeout_s
        self._deadline = time.monotonic() + self._timeout_s
        self._decision = threading.Lock()  # taken once: by the end that is complete, or by who gives it up

    def run(self) -> None:
        """Send the rows, and then the status. The status is sent too if the service refuses a row."""
        unsent = 0 if self._sending is None else self._send(self._sending)
        is_confirmed = vendor.end(self._op, self._code)
        is_complete = not unsent and is_confirmed and self._decision.acquire(blocking=False)
        if is_complete and self._sending is not None:
            self._sending.uploader.close()
            self._sending.queue.remove()

    def give_up(self) -> bool:
        """Give up the end unless it is complete. Returns whether it was given up."""
        return self._decision.acquire(blocking=False)

    def _send(self, sending: Sending) -> int:
        sending.queue.adopt(self._op)  # what an uploader that has outlived its rank had to leave
        vendor.stop_threads(self._op, self._code or 0)
        queue = vendor.take_queue(self._op)
        unsent = sending.uploader.stop(self._deadline - time.monotonic() - min(_STATUS_S, self._timeout_s / 4))
        queue.close()
        return unsent


class PlutoSanitizer(MetricSanitizer):
    """Makes rows of what a rank logs, and warns about values that Pluto's client drops silently."""

    def __init__(self, title: str, prefix: str) -> None:
        super().__init__(title, prefix, odd_floats="stored, and left out of Pluto's charts and statistics")

    def clean(self, data: Mapping[str, Any]) -> dict[str, Any]:
        row = super().clean(data)
        return {key: plain for key, value in row.items() if (plain := self._accepted(key, value)) is not None}

    def _accepted(self, key: str, value: Any) -> Any:
        if not (key.isascii() and key.isprintable()):
            self.warn_once(key, "Pluto replaces each character of a key that is not printable ASCII by '-'")
        if isinstance(value, int) and abs(value) >= _LARGEST_INT:
            return float(value)
        return value if isinstance(value, (int, float)) else self._text_or_media(key, value)

    def _text_or_media(self, key: str, value: Any) -> Any:
        from pluto import Data, File

        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and any(isinstance(item, (int, float)) for item in items):
            self.warn_once(key, "Pluto keeps only the last number of a list")
        if items and all(isinstance(item, (int, float, str, File, Data)) for item in items):
            return value
        kind = type(value).__name__
        self.warn_once(key, f"the value is left out: Pluto takes numbers, texts and its media classes, not {kind}")
        return None


class StepCounter:
    """Gives a step to rows that are logged without one.

    Pluto's charts have one value for a key and a step, the latest. So the steps continue where an earlier attempt has
    stopped. Where ranks share a run without a prefix, each takes steps that no other rank takes.
    """

    def __init__(self, request: RunRequest, run_id: str) -> None:
        info, config = request.info, request.config
        is_interleaved = info is not None and config.run_mode == "shared" and not config.rank_prefix
        self._run_id = run_id
        self._stride = (request.plan.writers or 1) if is_interleaved else 1
        position = (info.local_rank if config.rank_scope == "worker" else info.rank) if info is not None else 0
        self._offset = (position or 0) % self._stride

    @property
    def last(self) -> int:
        """The run's last step in this process."""
        return _last_steps.get(self._run_id, 0)

    def step_of(self, step: Any, sanitizer: MetricSanitizer) -> int:
        """Return `step` if Pluto takes it, or the next one."""
        if step is not None:
            number = _whole(step)
            if number is not None:
                _last_steps[self._run_id] = max(number, _last_steps.get(self._run_id, 0))
                return number
            sanitizer.warn_once(
                f"step={step!r}", "Pluto takes whole numbers from 0 on as steps: the row gets the next step"
            )
        last = _last_steps.get(self._run_id, 0)
        following = (last // self._stride + 1) * self._stride + self._offset
        _last_steps[self._run_id] = following
        return following

    def continue_run(self, settings: Any, request: RunRequest, last_step_here: int) -> None:
        """Ask for the last step of a run that exists: rows with its steps would replace its rows in charts.

        The service does not know the steps of rows that it has not received: `last_step_here` is the last one of those.
        """
        timeout_s = min(REQUEST_S / 2, request.deadline - time.monotonic())
        if _last_steps.get(self._run_id) or timeout_s <= 0:
            return
        _last_steps[self._run_id] = last_step_here
        try:
            with http_client(settings) as client:
                headers = vendor.request_headers(settings)
                answer = client.post(f"{settings.url_ingest}/step", headers=headers, timeout=timeout_s)
            _last_steps[self._run_id] = max(last_step_here, int(answer.json()["step"]))
        except Exception as error:
            logger.warning(
                "Pluto: the service does not say the last step of run %s (%s): rows that are logged without step= may "
                "replace an earlier attempt's rows in charts",
                self._run_id,
                type(error).__name__,
            )


def _whole(step: Any) -> int | None:
    try:
        number = int(step)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == step and 0 <= number < 2**63 else None
