"""What waits for the next row of a shared run."""

from __future__ import annotations

import threading
from typing import Any

from flyteplugins_tracking.trackers.rows import NextRow, RowBuffer


def test_values_of_two_threads_that_wait_for_a_row_are_both_in_it(monkeypatch):
    rows: list[Any] = []
    buffer = RowBuffer("global_step", "", lambda: None)
    other = threading.Thread(target=buffer.log, args=(rows.append, {"other": 2}), kwargs={"commit": False})
    take = NextRow.take

    def take_while_another_thread_logs(waiting: NextRow) -> dict[str, Any]:
        taken = take(waiting)
        if other.ident is None:
            other.start()
            other.join(0.1)
        return taken

    monkeypatch.setattr(NextRow, "take", take_while_another_thread_logs)
    buffer.log(rows.append, {"own": 1}, commit=False)
    other.join()
    buffer.commit(rows.append)
    assert rows == [{"own": 1, "other": 2}]
