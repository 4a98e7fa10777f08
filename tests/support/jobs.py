"""Run real jobs: torchrun, agents as nodes, mpirun, plain Python. Each has a deadline and its own environment."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
from wandb_files import StoredRun, read_runs

import flyteplugins_tracking
from flyteplugins_tracking._rank import launchers
from support.warm import client

# A shell that runs the tests in the background ignores SIGINT, and the trainings would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How much slower than an idle one a machine may be: what may last at most so long lasts at most so many times as long.
TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "10"))
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin"
)
Process: TypeAlias = "subprocess.Popen[str] | client.WarmProcess"

PACKAGE = Path(flyteplugins_tracking.__file__).parent
PROGRAMS = Path(__file__).parents[1] / "programs"
TRAIN = PROGRAMS / "train.py"


# The launchers, and a program for each tracker, platform and framework. Pluto's jobs are always cold.
_COLD_FIRST = {
    *("torch.distributed.run", "torch.distributed.launch", "flyteplugins_tracking", "pyflyte-execute"),
    *("train.py", "mlflow_runs.py", "trackio_scenarios.py", "sweeps.py", "signal_runs.py"),
    *("flyte_tasks.py", "flyte2_pod.py", "accelerate_runs.py", "lightning_runs.py", "hf_runs.py"),
}


def _is_cold(words: Sequence[str]) -> bool:
    """Whether a job is to have a new interpreter, by the variable TESTS_COLD: see CONTRIBUTING.md."""
    which = os.environ.get("TESTS_COLD", "")
    if which != "first":
        return {"": False, "1": True}[which]
    # A launcher costs several interpreters, with torch in each: it starts cold with the first of the other programs.
    started = next((name for word in reversed(words) if (name := Path(word).name) in _COLD_FIRST), None)
    if started is None:
        return False
    with suppress(FileExistsError):  # pytest's workers share this directory
        Path(os.environ["TESTS_WARM_DIR"], f"cold-{started}").touch(exist_ok=False)
        return True
    return False


def variables_of_launchers() -> set[str]:
    """Every variable that a detector of `_rank/launchers.py` names."""
    return set(re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK)"', Path(launchers.__file__).read_text()))


# By how their names begin: what else the launchers set, the trackers, Flyte.
_NOT_IN_A_JOB = re.compile(
    "|".join(sorted({re.split("(?<=_)", name)[0] for name in variables_of_launchers()}))
    + "|ROLE_|MASTER_|TORCH|WANDB_|PLUTO_|MLOP_|MLFLOW_|FLYTE_|_F_|_U_|RUN_NAME|ACTION_NAME|POD_CHILDREN|BATCH_JOB_"
)


@dataclass(frozen=True)
class Done:
    """A job that has ended.

    Attributes:
        reports: What each process of `train.py` reported, by rank; several attempts of one rank are several reports.
    """

    returncode: int
    output: str
    directory: Path

    @property
    def runs(self) -> list[StoredRun]:
        return read_runs(self.directory / "wandb")

    @property
    def reports(self) -> list[dict[str, Any]]:
        reports = [json.loads(path.read_text()) for path in (self.directory / "reports").glob("*.json")]
        return sorted(reports, key=lambda report: (report["rank"], report["restart_count"]))


# What the test that runs has started: a test that fails does not wait for its jobs, which would slow down the others.
started: list[Process] = []
# An id for jobs that are given one: runs of one id lock each other out, also those of tests in other processes.
RUN_ID = f"chosen-{os.getpid()}"


def environment(directory: Path, **more: str) -> dict[str, str]:
    """This environment without any launcher's or tracker's variables, with W&B offline in `directory`."""
    kept = {name: value for name, value in os.environ.items() if not _NOT_IN_A_JOB.match(name)}
    return {
        **kept,
        "HOME": str(directory),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(directory),
        "WANDB_SILENT": "true",
        "WANDB__SAVE_REQUIREMENTS": "false",  # the list of 300 packages: a third of what an opening costs
        "TRAIN_DIR": str(directory),
        **more,
    }


def run(
    command: Sequence[str | Path], directory: Path, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> Done:
    """Run `command` to its end; it and all that it has started are killed at the deadline."""
    return finish(start(command, directory, env), directory, timeout_s)


def start(
    command: Sequence[str | Path],
    directory: Path,
    env: Mapping[str, str] | None = None,
    cold: bool | None = None,
    log: int | None = None,
) -> Process:
    """Start `command`, forked from a warm process if it is Python's; in a new interpreter if `cold`.

    By default the variable TESTS_COLD says whether it is cold: "1" for each job, "first" for the first one
    of what `_COLD_FIRST` names. A service writes to the open file `log`, since nobody reads its output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    words, variables = [str(part) for part in command], environment(directory, **(env or {}))
    is_cold = _is_cold(words) if cold is None else cold
    process = None if is_cold else client.start(words, directory, variables, log)
    process = process or subprocess.Popen(
        words,
        cwd=directory,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if log is None else log,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def kill(process: Process) -> None:
    """Kill a process that may still run, and all that it has started: torchrun's workers have groups of their own."""
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def show_stacks(process: Process) -> None:
    """Have a process that hangs, and all that it has started, write where each thread is, and end."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        family = [leader, *leader.children(recursive=True)]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGABRT)
        psutil.wait_procs(family, timeout=5)


def output_of(process: Process) -> str:
    """What a process that was killed has written."""
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired as error:
        return f"{(error.output or b'').decode()}\nits output is open still: it has left a process that lives"


def finish(process: Process, directory: Path, timeout_s: float = 240) -> Done:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # It may wait for another job of this test, as an agent does for the other agents.
        unread = [one for one in started if one is process or (one.stdout and not one.stdout.closed)]
        for one in unread:
            show_stacks(one)
            kill(one)
        outputs = "\n\n".join(f"{one.args}\n{output_of(one)}" for one in unread)
        raise AssertionError(f"still running after {timeout_s} s:\n{outputs}") from None
    return Done(process.returncode, output, directory)


def train(**arguments: Any) -> list[str]:
    """The arguments that have Python run `train.py`: see there."""
    return [str(TRAIN), json.dumps(arguments)]


def python(directory: Path, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Done:
    return run([sys.executable, *arguments], directory, env)


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def one_node(directory: Path, processes: int, options: Sequence[str] = (), **arguments: Any) -> Done:
    """`train.py` under one agent."""
    return run([*torchrun("--standalone", f"--nproc-per-node={processes}", *options), *train(**arguments)], directory)


def nodes(
    directory: Path,
    processes: Sequence[int],
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Done:
    """`train.py` under one agent per entry of `processes`: each is a node to torchelastic."""
    rendezvous = f"127.0.0.1:{free_port()}"
    agents = [
        start(
            [
                *torchrun(f"--nnodes={len(processes)}", f"--nproc-per-node={n}", "--rdzv-backend=c10d"),
                *(f"--rdzv-endpoint={rendezvous}", *options, *train(**arguments)),
            ],
            directory,
            env,
        )
        for n in processes
    ]
    done = [finish(agent, directory) for agent in agents]
    return Done(max(d.returncode for d in done), "\n".join(d.output for d in done), directory)


def printed(line: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a `flyteplugins-tracking` that a job has printed, and the variables that stand before it."""
    words = shlex.split(line)
    at = next(index for index, word in enumerate(words) if "=" not in word)
    return words[at + 1 :], dict(word.split("=", 1) for word in words[:at])


def search_path(directory: Path) -> str:
    """A PYTHONPATH with `directory`, and with what this process has: the package that is tested may be there."""
    return os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """A port on which nothing listens. It is below those that the kernel gives to other tests' sockets meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
