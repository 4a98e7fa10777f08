"""A Slurm of one's own on this machine: munged, slurmctld and slurmds on loopback, in a private directory.

Several slurmds on one machine are several nodes, which needs a Slurm built with --enable-multiple-slurmd, as Debian's
and Ubuntu's are: https://slurm.schedmd.com/programmer_guide.html#multiple_slurmd_support
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from support.jobs import free_port

T = TypeVar("T")

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "srun", "sbatch", "salloc", "scontrol")
INSTALL = "apt-get install munge slurmctld slurmd slurm-client"
# A batch job that exits with this is requeued.
REQUEUE_EXIT = 42

_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])
_PASSED_ON = ("LANG", "LD_LIBRARY_PATH", "TMPDIR")
_FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
# cred_expire is also what a requeued job waits before it starts again, by default 120 s. KillWait is the time between
# SIGTERM and SIGKILL, by default 30 s. With proctrack/pgid SIGTERM reaches a task and not a daemon that it started in a
# session of its own, as with the usual proctrack/cgroup, which containers do not allow.
_CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,bf_interval=1,sched_interval=1
LaunchParameters=use_interactive_step
InteractiveStepOptions="--interactive --preserve-env $SHELL"
MpiDefault=none
RequeueExit={requeue_exit}
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


@dataclass(frozen=True)
class Job:
    """What slurmctld says about a job.

    Attributes:
        state: For instance "PENDING", "RUNNING" or "COMPLETED".
        exit_code: The batch script's.
        restarts: How often it was requeued.
    """

    state: str
    exit_code: int
    restarts: int


@dataclass(frozen=True)
class Cluster:
    """A running Slurm.

    Attributes:
        name: Its ClusterName.
        directory: Where its configuration, sockets, state and logs are.
        nodes: The names of its nodes.
    """

    name: str
    directory: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What its daemons and clients run in: none of this process's launcher, Slurm or tracker variables."""
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        return {
            **passed_on,
            "PATH": _PATH,
            "HOME": str(self.directory),
            "SHELL": "/bin/bash",
            "SLURM_CONF": str(self.directory / "slurm.conf"),
        }

    def run(
        self, *command: str | Path, stdin: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> str:
        """Run a client, for instance `srun`, to its end and return its standard output.

        Raises:
            AssertionError: It fails, or is still running after `timeout_s` seconds.
        """
        arguments = [str(part) for part in command]
        environment = {**self.environment, **(env or {})}
        try:
            done = subprocess.run(
                arguments, input=stdin, env=environment, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{arguments} is still running after {timeout_s} s: {error.stderr!r}") from None
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self, script: str, *options: str, output: Path, env: Mapping[str, str] | None = None, workdir: Path
    ) -> int:
        """Hand a bash script to `sbatch` and return the job's id. What it prints is appended to `output`."""
        files = (f"--output={output}", "--open-mode=append", f"--chdir={workdir}")
        text = f"#!/bin/bash\nset -e\n{script}\n"
        return int(self.run("sbatch", "--parsable", *files, *options, stdin=text, env=env))

    def job(self, job_id: int) -> Job:
        """The job as slurmctld sees it now."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(job_id))
        values = dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))
        return Job(values["JobState"], int(values["ExitCode"].partition(":")[0]), int(values["Restarts"]))

    def wait(self, job_id: int, *, restarts: int = 0, timeout_s: float = 120) -> Job:
        """Wait until the job has ended for good, after `restarts` requeues."""

        def ended() -> Job | None:
            job = self.job(job_id)
            return job if job.state in _FINAL and job.restarts >= restarts else None

        return wait_for(ended, f"job {job_id} to end", timeout_s)


def missing_programs() -> list[str]:
    """Which of Slurm's and munge's programs this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


def wait_for(condition: Callable[[], T | None], what: str, timeout_s: float) -> T:
    """Poll until `condition` gives something true, and return it.

    Raises:
        AssertionError: It does not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.2)
    return value


@contextmanager
def start_cluster(nodes: int = 3, cpus: int = 8) -> Iterator[Cluster]:
    """Run a Slurm of `nodes` nodes. At the end all that it started is stopped and its directory is removed.

    Args:
        nodes: How many.
        cpus: What each is said to have, however many this machine has.

    Raises:
        AssertionError: A daemon ends, or a node is not ready in time; with the daemons' logs.
    """
    # Not pytest's directory: its path is too long for a socket.
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        directory.chmod(0o711)
        names = tuple(f"node{i}" for i in range(nodes))
        cluster = Cluster(f"test{secrets.token_hex(2)}", directory, names)
        _configure(cluster, cpus)
        stack.callback(_kill_strays, cluster)
        _start_daemons(cluster, stack)
        yield cluster


def _configure(cluster: Cluster, cpus: int) -> None:
    """Write the munge key and slurm.conf."""
    key = cluster.directory / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    (cluster.directory / "state").mkdir()
    for name in cluster.nodes:
        (cluster.directory / f"spool-{name}").mkdir()
    host = socket.gethostname().partition(".")[0]
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cpus}"
        for name in cluster.nodes
    ]
    text = _CONFIGURATION.format(
        name=cluster.name,
        host=host,
        port=free_port(),
        user=pwd.getpwuid(os.getuid()).pw_name,
        directory=cluster.directory,
        requeue_exit=REQUEUE_EXIT,
        nodes="\n".join(lines),
    )
    (cluster.directory / "slurm.conf").write_text(text)


def _start_daemons(cluster: Cluster, stack: ExitStack) -> None:
    """Start the daemons in the foreground, as this process's children, and wait until all nodes are idle."""
    directory = cluster.directory
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(name: str, *command: str) -> None:
        process = _start_daemon(cluster, name, command)
        stack.callback(_stop, process)
        started[name] = process

    def wait(condition: Callable[[], bool], what: str) -> None:
        def checked() -> bool:
            dead = [name for name, process in started.items() if process.poll() is not None]
            assert not dead, f"{' and '.join(dead)} ended"
            return condition()

        try:
            wait_for(checked, what, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_logs(cluster)}") from None

    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    start("munged", "--foreground", "--force", *(f"--{option}={directory / name}" for option, name in files.items()))
    wait((directory / "munge.socket").exists, "munged's socket")
    start("slurmctld", "-D")
    for name in cluster.nodes:
        start(f"slurmd-{name}", "-D", "-N", name)
    wait(lambda: _all_idle(cluster), "idle nodes")


def _start_daemon(cluster: Cluster, name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    program = shutil.which(name.partition("-")[0], path=_PATH)
    assert program is not None, f"{name} is not installed: {INSTALL}"
    with (cluster.directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [program, *arguments],
            cwd=cluster.directory,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _all_idle(cluster: Cluster) -> bool:
    """Whether slurmctld answers and has heard from each node."""
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and done.stdout.split() == ["idle"] * len(cluster.nodes)


def _logs(cluster: Cluster) -> str:
    paths = sorted(cluster.directory.glob("*.log"))
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in paths)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill_strays(cluster: Cluster) -> None:
    """Kill what outlives the daemons: the slurmstepds of running jobs, their tasks, and clients.

    All of them, and nothing else on the machine, have this cluster's configuration in their environment.
    """
    deadline = time.monotonic() + 10
    while (strays := _strays(cluster)) and time.monotonic() < deadline:
        for stray in strays:
            with suppress(psutil.NoSuchProcess):
                stray.kill()
        time.sleep(0.1)


def _strays(cluster: Cluster) -> list[psutil.Process]:
    processes = psutil.process_iter(["environ"])
    own = cluster.environment["SLURM_CONF"]
    return [one for one in processes if (one.info["environ"] or {}).get("SLURM_CONF") == own]
