"""Which nodes have written all that they have to a run: told through the store of the launcher, or of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_POLL_S = 0.05


class Attendance:
    """The writers of one run, over all attempts of the job. A store that has gone tells nothing, and nobody waits.

    The primary counts its entries, and so does each other writer. What that leaves behind has both counts at that time,
    so that nothing of an earlier attempt, whose writers may have been killed, is taken for this one's; and so that a
    writer which has come and gone before the primary was there is not waited for.
    """

    def __init__(self, store: Any, run_id: str | None) -> None:
        """`store`: a `torch.distributed.Store` that all nodes share."""
        self._store = store
        self._prefix = f"flyteplugins_tracking/writers/{run_id}"
        self._entry = 0

    def enter_as_primary(self) -> None:
        """Before the run is opened."""
        with suppress(RuntimeError):
            self._entry = self._store.add(f"{self._prefix}/entries", 1)

    def enter(self, label: str) -> bool:
        """Enter as another writer, under its label. Returns whether there has been an earlier attempt."""
        with suppress(RuntimeError):
            entries: int = self._store.add(f"{self._prefix}/entries/{label}", 1)
            return entries > 1 or self._store.add(f"{self._prefix}/entries", 0) > 1
        return False

    def leave(self, label: str) -> None:
        """The other writer has written all."""
        with suppress(RuntimeError):
            entries = self._store.add(f"{self._prefix}/entries", 0)
            self._store.set(f"{self._prefix}/left/{label}", f"{entries} {self._own_entries(label)}")

    def wait(self, labels: Sequence[str], timeout_s: float, until: Callable[[], bool]) -> list[str]:
        """Wait for these writers to leave, at most `timeout_s` seconds and at most `until` holds.

        Returns:
            The labels of those that have not.
        """
        end = time.monotonic() + timeout_s
        with suppress(RuntimeError):
            while (missing := [label for label in labels if not self._has_left(label)]) and not until():
                if time.monotonic() > end:
                    return missing
                time.sleep(_POLL_S)
        return []

    def _has_left(self, label: str) -> bool:
        left = f"{self._prefix}/left/{label}"
        if not self._store.check([left]):
            return False
        entries, own = map(int, self._store.get(left).split())
        return entries >= self._entry or (own >= self._entry and own == self._own_entries(label))

    def _own_entries(self, label: str) -> int:
        entries: int = self._store.add(f"{self._prefix}/entries/{label}", 0)
        return entries
