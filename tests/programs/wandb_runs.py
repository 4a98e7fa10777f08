"""Trainings with W&B's real client, for `test_wandb.py`. Arguments: a function's name, and the function's own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import wandb

from flyteplugins_tracking import TrackerUnavailableError, get_run, tracking_init
from flyteplugins_tracking._util import proc

TRAINING = Path(__file__).with_name("wandb_training.py")


def arguments() -> None:
    """Every argument of `wandb.init` that the decorator takes."""
    settings = wandb.Settings(run_job_type="from-settings")
    identity = {"project": "p", "entity": "e", "id": "i", "group": "g", "name": "n", "tags": ["t"], "notes": "no"}

    @tracking_init(**identity, job_type="j", dir="elsewhere", settings=settings, config={"a": {"b": 1}})
    def train() -> None:
        run = get_run()
        assert wandb.run is run
        seen = (run.project, run.entity, run.id, run.group, run.name, run.tags, run.notes, run.job_type)
        assert seen == ("p", "e", "i", "g", "n", ("t",), "no", "j"), seen
        assert run.config["a"] == {"b": 1}
        assert (run.settings.init_timeout, run.settings.finish_timeout) == (30, 0)
        wandb.log({"x": 1})

    Path("elsewhere").mkdir()
    train()
    assert settings.run_id is None


def settings() -> None:
    """The user's timeouts in `settings=`, as a dict and as an object."""
    timeouts = {"init_timeout": 7, "finish_timeout": 8}
    for given in (timeouts, wandb.Settings(**timeouts)):

        @tracking_init(settings=given)
        def train() -> None:
            run = get_run()
            assert (run.settings.init_timeout, run.settings.finish_timeout) == (7, 8)

        train()


def user_finishes() -> None:
    """The function ends the run itself, logs on and fails."""

    @tracking_init
    def train() -> None:
        run = get_run()
        run.log({"x": 1})
        run.finish()
        assert wandb.run is run
        run.log({"x": 2})
        raise ValueError("made to fail")

    train()


def log_late(run: Any) -> None:
    """A validation whose steps are epochs, ten results of an evaluation that come late, and steps that go on."""
    for step in range(10):
        run.log({"loss": step}, step=step)
        if step % 5 == 4:
            run.log({"val": step}, step=step // 5)
    for step in range(10):
        run.log({"eval/a": step, "loss": -1 - step}, step=step)
        run.log({"eval/b": step}, step=step)
    for step in (10, 11, 50):
        run.log({"loss": step}, step=step)
        run.log({"x": step}, step=step)
    run.log({"loss": -99}, step=50 - 1)


def log_late_keys(run: Any) -> None:
    """Training and evaluation have keys in common, and one is the name of the library's column."""
    for step in range(6):
        run.log({"loss": step, "epoch": step, "global_step": 10 * step}, step=step)
        if step % 2:
            run.log({"val": step - 1, "epoch": step - 1, "global_step": 10 * step - 10}, step=step - 1)


def log_in_threads() -> None:
    """Four threads, each with its own steps."""
    run, start = get_run(), threading.Barrier(4)

    def log(key: str) -> None:
        start.wait()
        for step in range(25):
            run.log({key: step}, step=step)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, ("a", "b", "c", "d")))


def log_in_order(run: Any) -> None:
    for step in (0, 0, 1, 5, 5):
        run.log({"loss": step}, step=step)
    run.log({"x": 1})
    run.log({"x": 2}, commit=False)
    run.log({"x": 3}, step=9)


def late_rows() -> None:
    """The same rows with W&B's client alone and with the decorator."""
    for log in (log_late, log_late_keys, log_in_order):
        run = wandb.init(project="tests", id=f"bare-{log.__name__}")
        log(run)
        run.finish()
        tracking_init(project="tests", id=log.__name__)(lambda log=log: log(get_run()))()

    @tracking_init(project="tests", id="defined")
    def defined() -> None:
        get_run().define_metric("eval/*", step_metric="epoch")
        log_late(get_run())

    defined()
    tracking_init(project="tests", id="threads")(log_in_threads)()


def speaks(number: str) -> None:
    """An attempt, by its launcher's count and then as one that continues a run of that id."""

    @tracking_init(project="tests", id=None if number == "restarts" else "spoken")
    def train() -> None:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] if number == "restarts" else number
        print("this is attempt", attempt)
        get_run().log({"x": 1})
        if number == "restarts" and attempt == "0":
            raise ValueError("made to fail")

    train()


def in_threads() -> None:
    @tracking_init(id="given")
    def train(number: int) -> str:
        get_run().log({"number": number})
        return str(get_run().id)

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(train, range(3)))) >= 1


def separate_run_before() -> None:
    """The user has a run open that is not the global one."""
    mine = wandb.init(id="mine", project="p", reinit="create_new")

    @tracking_init(id="ours")
    def train() -> None:
        assert get_run().id == "ours"
        get_run().log({"x": 1})

    train()
    mine.log({"x": 2})
    mine.finish()


def child_outlives_service() -> None:
    """A child is started with the variables of a process whose service ends before it."""
    run = wandb.init(id="parent")
    assert "WANDB_SERVICE" in os.environ
    env = {**os.environ, "WANDB_RUN_ID": "child"}
    child = subprocess.Popen([sys.executable, TRAINING], env=env, stdout=subprocess.PIPE, text=True)
    run.finish()
    wandb.teardown()
    assert child.wait(240) == 0


def arguments_of_wandb_core() -> None:
    """Prints how wandb-core was started."""

    @tracking_init(project="tests")
    def train() -> None:
        import psutil

        (core,) = (child for child in psutil.Process().children() if "wandb-core" in child.name())
        print(*core.cmdline(), flush=True)

    train()


def opened_again() -> None:
    """The run cannot be opened, which the file `refused` says; it is opened again when the file `back` is there."""

    @tracking_init(
        project="tests", id="again", if_unavailable="raise", init_timeout_s=float(os.environ["INIT_TIMEOUT_S"])
    )
    def train() -> None:
        get_run().log({"x": 1})

    try:
        train()
    except TrackerUnavailableError:
        Path("refused").touch()
    while not Path("back").exists():
        time.sleep(0.05)
    train()


def lightning_child() -> None:
    """Starts this program again as Lightning's ddp does: with LOCAL_RANK, WORLD_SIZE and NODE_RANK, and no RANK."""

    @tracking_init
    def train() -> None:
        print("RANK", os.environ.get("LOCAL_RANK", "parent"), get_run() is not None, flush=True)
        if "LOCAL_RANK" not in os.environ:
            shape = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
            subprocess.run([sys.executable, *sys.argv], env={**os.environ, **shape}, check=True)

    train()


def forked_child() -> None:
    """A decorated function in a forked child, while the parent's has its run open."""

    def log_in_child() -> None:
        @tracking_init(project="p", id="child")
        def child() -> None:
            get_run().log({"row": 1})

        child()

    @tracking_init(project="p", id="parent")
    def parent() -> None:
        get_run().log({"row": 0})
        process = multiprocessing.get_context("fork").Process(target=log_in_child)
        process.start()
        process.join()
        get_run().log({"row": process.exitcode})

    parent()


def vendors_object() -> None:
    """The run inside and after the function is the vendor's own object. What threads log after the end is lost."""
    logs = []

    @tracking_init(id="ours")
    def train() -> Any:
        run = get_run()
        assert isinstance(run, wandb.Run)
        assert wandb.run is run
        assert type(run).__name__ == "Run"
        assert pickle.dumps(run)
        logs.extend([run.log, wandb.log])  # as a pool has them that has not come to a call yet
        return run

    run = train()
    assert type(run) is wandb.Run
    with ThreadPoolExecutor() as pool:
        for log in (*logs, run.log, wandb.log):
            assert pool.submit(log, {"x": 1}, step=2).result() is None


def ended_by_child() -> None:
    """A child ends the run that it was given."""

    @tracking_init(id="ours", kill_after_s=10)
    def train() -> float:
        run = get_run()
        run.log({"x": 1})
        child = multiprocessing.get_context("spawn").Process(target=wandb.Run.finish, args=(run,))
        child.start()
        child.join()
        run.log({"x": 2})
        return time.monotonic()

    returned_at = train()
    assert time.monotonic() - returned_at < 40


def core_dies() -> None:
    """wandb-core is killed between two rows."""

    @tracking_init(id="ours")
    def train() -> None:
        get_run().log({"x": 0})
        stored_rows(1)
        get_run().log({"x": 1})  # the rows just behind it do not wait for wandb-core
        for pid in proc.children(os.getpid()):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for x in range(2, 5):
            get_run().log({"x": x})
        get_run().summary["best"] = 5
        assert get_run().summary["best"] == 5
        assert get_run().summary.get("worst", 1) == 1

    train()


def kill_core() -> None:
    core: Any = wandb.sdk.wandb_setup.singleton().ensure_service()._proc._process
    os.kill(core.pid, signal.SIGKILL)
    core.wait()


def loses_the_request_to_end() -> None:
    """wandb-core does not read that it is to end: it hangs."""
    from flyteplugins_tracking.trackers.wandb import vendor

    @tracking_init(project="tests", id="ended")
    def train() -> None:
        get_run().log({"x": 1})

    train()
    core: Any = wandb.sdk.wandb_setup.singleton().ensure_service()._proc._process
    Path("core").write_text(str(core.pid))
    vendor._ENDING_S = (1.0, 1.0)
    os.kill(core.pid, signal.SIGSTOP)
    threads = [int(task.name) for task in Path(f"/proc/{core.pid}/task").iterdir()]
    while not {proc.state(thread) for thread in threads} <= {"T", ""}:  # one may have ended
        time.sleep(0.01)


def loses_its_key() -> None:
    """The server refuses the key from a row on. When a warning has said so, another row is logged."""
    from wandb.sdk.lib.run_stopping import RunStopChecker

    RunStopChecker.__init__.__kwdefaults__["poll_interval"] = 0.2
    told = threading.Event()
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: told.set() or True if "refused its rows" in record.getMessage() else True)
    logging.getLogger("flyteplugins_tracking").addHandler(handler)

    @tracking_init(project="tests", id="revoked")
    def train() -> None:
        get_run().log({"x": 1})
        Path("logged").touch()
        while not Path("refusing").exists():
            time.sleep(0.05)
        get_run().log({"x": 2})
        print("told:", told.wait(60), flush=True)
        get_run().log({"x": 3})

    train()


def dies_when_the_server_is_gone() -> None:
    """When the file `refusing` is there, wandb-core is killed and rows are logged."""

    @tracking_init(project="tests", id="died", kill_after_s=9)
    def train() -> None:
        run = get_run()
        run.log({"x": 1})
        while not Path("refusing").exists():
            time.sleep(0.05)
        kill_core()
        for x in range(2, 200):
            run.log({"x": x})

    train()


def stored_rows(count: int) -> None:
    """Wait until the local file has so many rows."""
    from wandb_files import read_runs

    while sum(len(run.rows) for run in read_runs(Path("wandb"))) < count:
        time.sleep(0.05)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
