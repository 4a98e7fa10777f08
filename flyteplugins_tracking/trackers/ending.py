"""How long the end of a run may last: one rule for all services.

An ordinary end waits as the vendor's bare client does, while the service takes data. If nothing moves for
`finish_timeout_s`, the service is away, and the rest stays on this disk. After a SIGTERM, `kill_after_s` bounds the
end, also one that has begun before; and after Ctrl-C in an end, which a second one stops at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from flyteplugins_tracking._util.handlers import HANDLERS

if TYPE_CHECKING:
    from flyteplugins_tracking.trackers.base import Sigterm
    from flyteplugins_tracking.trackers.config import TrackingConfig

logger = logging.getLogger(__name__)

# How often a long end says what is left, in seconds.
_SAY_S = 30.0
# How often a wait looks for a SIGTERM, in seconds.
_POLL_S = 0.25
# How long an upload may stand still while the service answers other requests, in seconds: a store may take minutes to
# answer for a large file.
_STILL_S = 600.0
# An end that begins late after a SIGTERM has the time until the SIGKILL, less this part of the process's own time, and
# at least so many seconds.
_MARGIN, _LEAST_S = 0.4, 1.0


class EndLimit:
    """The time that the end of a run has left.

    Attributes:
        left: Returns what is not sent yet, in words; empty if nobody knows. For the line that a long end says.
        asks: Asks whether the service answers, while an upload is under way that does not tell how far it is; None if
            there is none. It is called in a thread, when nothing has moved for a while.
    """

    def __init__(self, title: str, run_id: str, config: TrackingConfig, sigterm: Sigterm) -> None:
        """Begin now.

        Args:
            title: The service's name in messages.
            run_id: The run's id in messages.
            config: The user's arguments.
            sigterm: What is known of SIGTERM.
        """
        self.left: Callable[[], str] = str
        self.asks: Callable[[], bool] | None = None
        self._asking: threading.Thread | None = None
        self._title, self._run_id = title, run_id
        self._config, self._sigterm = config, sigterm
        self._limit_s, self._has_told = config.finish_timeout_s, False
        self._began = self._moved_at = self._grown_at = self._said_at = time.monotonic()

    def moved(self) -> None:
        """Take note that the service has taken something."""
        self._moved_at = self._grown_at = time.monotonic()

    @property
    def is_terminated(self) -> bool:
        """Whether SIGTERM has come."""
        return self._sigterm.terminated_at is not None

    @property
    def _signalled_at(self) -> float | None:
        """When the signal came that bounds the end; None if none has."""
        return self._sigterm.terminated_at or HANDLERS.interrupted_at

    @property
    def until(self) -> float:
        """When the end is over if nothing moves, in seconds of `time.monotonic`."""
        signalled_at = self._signalled_at
        if signalled_at is None:
            return self._moved_at + self._limit_s
        begins, killed_at = max(self._began, signalled_at), signalled_at + self._config.kill_after_s
        if begins > killed_at:  # nobody has killed
            return begins + self._limit_s
        latest = killed_at - _MARGIN * (self._config.kill_after_s - self._limit_s)
        return max(min(begins + self._limit_s, latest), begins + min(_LEAST_S, self._limit_s))

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 if it is over."""
        return max(0.0, self.until - time.monotonic())

    @property
    def why(self) -> str:
        """Why the end is over, in messages."""
        if self._signalled_at is None:
            return f"nothing has moved for {self._config.finish_limit}"
        name = "Ctrl-C" if self._sigterm.terminated_at is None else "SIGTERM"
        return f"{name} has come, which leaves it {self._config.finish_limit}"

    def lasts(self) -> bool:
        """Whether there is time left. Says now and then what the end waits for."""
        now = time.monotonic()
        if now > self._moved_at + self._limit_s / 3 and now < self._grown_at + _STILL_S:
            self._ask()
        lasts = self.left_s > 0
        if lasts and HANDLERS.interrupted_at is not None and not self._has_told:
            self._has_told = True
            text = "%s: run %s: its end may take %.0f s from here on. To stop it at once, press Ctrl-C again"
            logger.warning(text, self._title, self._run_id, self.left_s)
        if lasts and now > self._said_at + _SAY_S:
            self._said_at, left = now, self.left()
            text = "%s: run %s: the end has waited %.0f s for the service to take what is left%s"
            logger.warning(text, self._title, self._run_id, now - self._began, f": {left}" if left else "")
        return lasts

    def _ask(self) -> None:
        asks = self.asks
        if asks is None or (self._asking is not None and self._asking.is_alive()):
            return

        def ask() -> None:
            with suppress(Exception):
                if asks():
                    self._moved_at = time.monotonic()

        self._asking = threading.Thread(target=ask, daemon=True)
        with suppress(RuntimeError):  # there is no thread to be had
            self._asking.start()

    def wait_for(self, changed: threading.Condition, is_done: Callable[[], bool], reserve_s: float = 0.0) -> bool:
        """Wait for `is_done`, with `changed` held, until `reserve_s` seconds are left. Returns whether it is done."""
        while not is_done() and self.lasts() and self.left_s > reserve_s:
            changed.wait(min(_POLL_S, self.left_s - reserve_s))
        return is_done()
