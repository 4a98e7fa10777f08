"""SIGTERM beyond the fault matrix: what was installed is put back, and children and threads are left alone."""

from __future__ import annotations

import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest
from reliability.harness import ends, job, python, torchrun
from support import jobs
from support.loopback import Fault
from support.recording import recorded
from support.wandb_server import WandbServer

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._runs.sigterm.main import SigtermWatcher


def lines_of(job) -> list[str]:
    return [line for lines in job.notes().values() for line in lines if not line.startswith(("logged", "held"))]


@pytest.mark.parametrize("settings", [{}, {"handler": "flag"}, {"nested": True}], ids=str)
def test_what_was_installed_before_is_put_back(tmp_path, settings):
    with job(tmp_path) as started:
        started.start(python(), **ends("return", **settings))
        assert started.outcome().returncode == 0
        assert lines_of(started)[-2:] == ["restored True", "threads []"]


def test_a_handler_that_the_function_installs_stays(tmp_path):
    with job(tmp_path) as started:
        started.start(python(), **ends("return", handler_inside="flag"))
        assert started.outcome().returncode == 0
        assert lines_of(started)[-2:] == ["restored False", "threads []"]


@pytest.mark.parametrize(
    ("settings", "returncode", "expected"),
    [
        (ends("loop"), 143, ["unwound"]),
        (ends("finally"), 143, ["finally", "unwound"]),
        (ends("loop", handler="flag"), 0, ["handler", "returns", "unwound", "restored True", "threads []"]),
        (ends("sleep", handler="exit 5"), 5, ["handler", "unwound"]),
        (ends("loop", handler="os._exit 6"), 6, ["handler"]),
        (ends("loop", handler_inside="flag"), 0, ["handler", "returns", "unwound", "restored False", "threads []"]),
    ],
    ids=str,
)
def test_the_process_ends_as_it_would_have(tmp_path, settings, returncode, expected):
    with job(tmp_path) as started:
        process = started.start(python(), **settings)
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        assert started.outcome().returncode == returncode
        lines = lines_of(started)
        assert lines[lines.index("ready 0 0") + 1 :] == expected


def test_repeated_signals_interrupt_no_finally(tmp_path):
    with job(tmp_path) as started:
        process = started.start(python(), **ends("slow finally"))
        started.wait_for("ready 0 0")
        for _ in range(5):
            started.signal(process.pid)
            time.sleep(0.1)
        found = started.outcome()
        assert (found.returncode, found.exit_codes, found.lost) == (143, (143,), 0)
        assert "finally" in lines_of(started)


def test_a_process_in_a_collective_ends_within_two_seconds_of_its_run(tmp_path):
    with job(tmp_path) as started:
        started.start(torchrun(), **ends({"0": "collective", "1": "sleep"}))
        (rank_0,) = started.wait_for("blocked 0")
        started.wait_for("ready 1 0")
        started.signal(rank_0)
        started.server.wait_for(lambda: started.server.runs[0].completed)
        ended = time.monotonic()
        while Path("/proc", str(rank_0), "cmdline").exists() and Path("/proc", str(rank_0), "cmdline").read_text():
            assert time.monotonic() < ended + 2
            time.sleep(0.02)
        assert "unwound" not in started.notes()[rank_0]
        assert started.outcome().exit_codes == (143,)


CHILDREN = """
    import multiprocessing, os, signal, subprocess, sys, time
    from flyteplugins_tracking import get_run, tracking_init

    def child(seen):
        seen.put((get_run() is None, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
        time.sleep(60)

    @tracking_init(project="tests", id="parent")
    def train():
        fork = multiprocessing.get_context("fork")
        seen = fork.Queue()
        process = fork.Process(target=child, args=(seen,))
        process.start()
        print(*seen.get(timeout=30))
        process.terminate()
        process.join()
        print(process.exitcode)
        other = subprocess.Popen(["sleep", "60"])
        other.terminate()
        print(other.wait())
        time.sleep(0.5)
        get_run().log({"after": 1})

    train()
"""


def test_a_signal_to_a_child_ends_the_child_alone(tmp_path):
    done = jobs.python(tmp_path, "-c", textwrap.dedent(CHILDREN))
    assert done.output.split() == ["True", "True", "-15", "-15"]
    (run,) = done.runs
    assert (run.exit_code, len(run.rows)) == (0, 1)


def test_an_ignored_signal_stays_ignored(tmp_path):
    script = """
        import os, signal
        from flyteplugins_tracking import tracking_init
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        @tracking_init(project="tests")
        def train():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN

        train()
    """
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert (done.returncode, [run.exit_code for run in done.runs]) == (0, [0]), done.output


def test_a_function_in_a_thread_works_without_signals(monkeypatch):
    runs, before, seen = recorded(monkeypatch), signal.getsignal(signal.SIGTERM), []

    @tracking_init
    def train() -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]
    assert [run.exit_codes for run in runs.runs] == [[0]]


RACE = """
    import multiprocessing, os, signal
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="tests", id="parent")
    def train():
        fork = multiprocessing.get_context("fork")
        for n in range(150):
            process = fork.Process(target=signal.pause)
            process.start()
            process.terminate()
            process.join(20)
            assert process.exitcode == -signal.SIGTERM, process.exitcode
            get_run().log({"n": n})

    train()
"""


def test_a_signal_to_a_child_that_has_just_been_forked_ends_the_child_alone(tmp_path):
    done = jobs.python(tmp_path, "-c", textwrap.dedent(RACE))
    assert done.returncode == 0, done.output
    assert [(run.exit_code, len(run.rows)) for run in done.runs] == [(0, 150)]


@pytest.mark.parametrize("log", ["wandb.log", "hoisted"])
def test_a_log_that_was_fetched_before_the_signal_works_after_it(tmp_path, log):
    """The module's function, and a method in a variable."""
    script = f"""
        import os, signal, threading, wandb
        from flyteplugins_tracking import get_run, tracking_init
        flag = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: flag.set())

        @tracking_init(project="tests")
        def train():
            log = {"wandb.log" if log == "wandb.log" else "get_run().log"}
            for n in range(500):
                {"wandb.log" if log == "wandb.log" else "log"}({{"n": n}})
                if n == 100:
                    os.kill(os.getpid(), signal.SIGTERM)
            assert flag.wait(10)

        train()
    """
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.output
    assert [row["n"] for run in done.runs for row in run.rows] == list(range(500))
    assert {run.exit_code for run in done.runs} == {143}


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_second_signal_does_not_cut_the_runs_end_short(tmp_path, second):
    with job(tmp_path) as started, started.server.failing(Fault.slow(1, only="filestream")):
        process = started.start(python(), **ends("loop"))
        started.wait_for("ready 0 0")
        started.signal(process.pid)
        time.sleep(0.3)
        started.signal(process.pid, second)
        found = started.outcome()
        assert (found.exit_codes, found.lost) == ((143,), 0), found.output


def test_a_process_that_the_signal_would_have_ended_does_not_wait_for_its_threads(tmp_path):
    script = """
        import os, signal, threading, time
        from flyteplugins_tracking import tracking_init

        @tracking_init(project="tests")
        def train():
            threading.Thread(target=time.sleep, args=(120,)).start()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(120)

        train()
    """
    began = time.monotonic()
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert (done.returncode, [run.exit_code for run in done.runs]) == (143, [143])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("place", ["before", "inside"])
def test_the_signal_reaches_an_asyncio_loop(tmp_path, place):
    """Its own handler runs when the run has ended, also where the function has set it."""
    handler = "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)"
    before, inside = (handler, "pass") if place == "before" else ("pass", handler)
    script = """
        import asyncio, os, signal
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(project="tests")
        async def train(told):
            {inside}
            await asyncio.sleep(0.2)
            get_run().log({"x": 1})
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(told.wait(), 20)
            get_run().log({"x": 2})

        async def main():
            told = asyncio.Event()
            {before}
            await train(told)

        asyncio.run(main())
    """
    script = script.replace("{before}", before).replace("{inside}", inside)
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.output
    assert [run.exit_code for run in done.runs] == [143, 143]
    assert [row["x"] for run in done.runs for row in run.rows] == [1, 2]


def test_nothing_is_left_in_the_process_after_many_runs(tmp_path):
    script = """
        import os, threading
        from flyteplugins_tracking import get_run, tracking_init

        @tracking_init(project="tests")
        def train():
            get_run().log({"x": 1})

        def held():
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for _ in range(3):
            train()
        before = held()
        for _ in range(30):
            train()
        print(before == held() or (before, held()))
    """
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert done.output.strip().endswith("True"), done.output
    assert len(done.runs) == 33


def test_in_a_data_loaders_worker_there_is_no_run_and_none_is_ended(tmp_path):
    script = """
        import os
        from torch.utils.data import DataLoader, Dataset
        from flyteplugins_tracking import get_run, tracking_init

        class Squares(Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, index):
                assert get_run() is None and os.getpid() != parent
                return index * index

        parent = os.getpid()

        @tracking_init(project="tests")
        def train():
            for _ in range(2):
                for batch in DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                    get_run().log({"sum": int(batch.sum())})

        train()
    """
    with WandbServer() as server:
        done = jobs.python(tmp_path, "-c", textwrap.dedent(script), env=server.environment)
        (run,) = server.runs
        assert (done.returncode, run.exit_codes, len(run.rows)) == (0, [0], 20), done.output


SURVIVED = """
    import os, pickle, signal, threading, time, wandb
    from flyteplugins_tracking import get_run, tracking_init
    signal.signal(signal.SIGTERM, lambda *_: {in_handler})

    def tell_to_end():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    @tracking_init(project="tests", id="inner", run_mode="new")
    def inner():
        get_run().log({{"n": 0}})
        tell_to_end()
        get_run().log({{"n": 1}})

    @tracking_init(project="tests", id="outer")
    def train(told):
        get_run().log({{"n": 0}})
        told()
        {after}

    @tracking_init(project="tests", id="evaluation")
    def evaluate():
        get_run().log({{"n": 0}})

    train({told})
    evaluate()
"""


@pytest.mark.parametrize(
    ("told", "in_handler", "after", "rows"),
    [
        ("tell_to_end", "None", "get_run().log({'n': 1})", {"outer": [0, 1], "evaluation": [0]}),
        ("tell_to_end", "get_run().log({'n': 1})", "wandb.log({'n': 2})", {"outer": [0, 1, 2], "evaluation": [0]}),
        ("tell_to_end", "None", "get_run().summary['best'] = 3", {"outer": [0], "evaluation": [0]}),
        ("inner", "None", "wandb.log({'n': 1})", {"outer": [0, 1], "inner": [0, 1], "evaluation": [0]}),
    ],
    ids=["log", "handler logs", "summary", "nested"],
)
def test_after_a_signal_that_was_survived_each_run_is_still_its_own(tmp_path, told, in_handler, after, rows):
    script = SURVIVED.format(told=told, in_handler=in_handler, after=after)
    with WandbServer() as server:
        done = jobs.python(tmp_path, "-c", textwrap.dedent(script), env=server.environment)
        assert done.returncode == 0, done.output
        assert {run.id: [row["n"] for row in run.rows] for run in server.runs} == rows
        assert {run.id: run.exit_codes[-1] for run in server.runs} == {
            **dict.fromkeys(rows, 143),
            "evaluation": 0,
        }


def test_a_loop_that_is_closed_inside_leaves_nothing_of_it_behind(tmp_path):
    """asyncio closes the socket that was the wakeup fd; its number is another file's then."""
    script = """
        import asyncio, os, signal, time
        from flyteplugins_tracking import get_run, tracking_init
        signal.signal(signal.SIGTERM, lambda *_: None)

        async def inside():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
            await asyncio.sleep(0.2)
            get_run().log({"n": 0})

        @tracking_init(project="tests")
        def train():
            asyncio.run(inside())
            files = [open(f"file-{n}", "wb", buffering=0) for n in range(10)]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            for file in files:
                file.close()

        train()
        assert signal.set_wakeup_fd(-1) == -1
        train()
    """
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert done.returncode == 0, done.output
    assert {path.read_bytes() for path in tmp_path.glob("file-*")} == {b""}


def test_a_process_with_thousands_of_open_files_is_watched(tmp_path):
    """Its main thread is in a C call, so that only the thread can end the run."""
    script = """
        import hashlib, os, resource, signal, threading
        from flyteplugins_tracking import tracking_init

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

        @tracking_init(project="tests")
        def train():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

        train()
    """
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script))
    assert (done.returncode, [run.exit_code for run in done.runs]) == (143, [143]), done.output


@pytest.mark.parametrize("is_reinstalled", [True, False])
def test_a_handler_that_calls_ours_says_itself_how_the_function_ends(is_reinstalled, monkeypatch):
    """Lightning's does: its loop then ends all ranks behind the same batch, with a checkpoint."""
    monkeypatch.setattr(SigtermWatcher, "_exit_in_the_end", lambda _: None)
    told: list[int] = []
    ended: list[int] = []
    watch, before = SigtermWatcher(ended.append), signal.getsignal(signal.SIGTERM)
    try:
        assert watch.start(None, timeout_s=1)
        watch.run_opened()
        chained = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *received: (told.append(received[0]), chained(*received)))
        if is_reinstalled:
            watch.reinstall()
        signal.raise_signal(signal.SIGTERM)  # unwinds nothing
        until = time.monotonic() + 5
        while not (told and ended) and time.monotonic() < until:
            time.sleep(0.01)
        assert (told, ended[0], watch.terminated) == ([signal.SIGTERM], 143, True)
        watch.stop()  # nor does this
    finally:
        signal.signal(signal.SIGTERM, before)
