"""Where ranks are, from the stacks that faulthandler writes."""

from __future__ import annotations

import faulthandler
import sysconfig
import threading

from flyteplugins_tracking._job.stacks import Frame, frames_of, place, verdict

LIBRARY = f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py"


def test_the_frames_of_a_thread_are_found_in_a_real_dump(tmp_path):
    release, started = threading.Event(), threading.Event()

    def waits() -> None:
        started.set()
        release.wait(60)

    thread = threading.Thread(target=waits)
    thread.start()
    started.wait(60)
    with open(tmp_path / "stacks.txt", "w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        dump = file.read()
    release.set()
    thread.join()
    assert thread.ident is not None
    functions = [frame.function for frame in frames_of(dump, thread.ident)]
    assert "waits" in functions
    assert functions.index("waits") > functions.index("wait")  # the innermost comes first
    assert frames_of(dump, 1) == []


def test_a_place_is_the_users_line_and_the_innermost_function():
    users = Frame("/home/me/train.py", 88, "train")
    assert place([Frame(LIBRARY, 2500, "all_reduce"), Frame(LIBRARY, 80, "wrapper"), users]) == "train.py:88 all_reduce"
    assert place([Frame("/home/me/data.py", 40, "next_batch"), users]) == "data.py:40 next_batch"
    assert place([Frame(LIBRARY, 1, "wait")]) == "distributed_c10d.py:1 wait"
    assert place([]) == "an unknown place"


def test_ranks_of_equal_places_are_named_together_the_most_first():
    places = dict.fromkeys([0, 2, 3, 4, 6], "at train.py:88 all_reduce") | {
        1: "at data.py:40 next_batch",
        5: "has ended",
    }
    assert verdict(places) == (
        "ranks 0, 2-4, 6 at train.py:88 all_reduce; rank 1 at data.py:40 next_batch; rank 5 has ended"
    )
