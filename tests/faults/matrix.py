"""Each fault of the matrix: how it is made, and what must be known of the run afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import flyte1_pods, jobs
from support.harness import ENDS, Job, Outcome, ends, flyte, job, python, torchrun
from support.loopback import Fault

Scenario = Callable[[Job], Outcome]
FIRST_ROWS = 50  # those that a rank logs before it is ready
PROMPT = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}  # seconds; 15 unless given
# For an outage that is shorter than W&B's own pauses between retries, of 2 to 60 s.
QUICK_RETRIES = {
    "WANDB__FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "1",
    "WANDB__FILE_STREAM_RETRY_WAIT_MAX_SECONDS": "1",
}


@dataclass(frozen=True)
class Case:
    """One line of the matrix.

    Attributes:
        fault: What happens.
        scenario: Makes it happen.
        exit_codes: What the server must have been told, in this order.
        state: The run's state at the end: one of these, where it depends on who is faster.
        within_s: How soon after the fault the job must have ended on an idle machine; None where nothing is said about
            it. A busy one has `TIME_SCALE` times as long: less than a vendor waits (90 s), or than the training would
            go on by itself.
        kept: Where every row must be: at the "server"; or in the "local file", where the server was not there; or there
            but for the last `FRESH_S`, where the writer was "killed".
        log_within_s: The longest that one `log` may take on an idle machine, with the same scale. That no `log` waits
            for a server which is down is shown by the rows that are logged meanwhile: see `midway`.
        restarts: What the run's config must tell at the end.
        one_writer: Whether the rows have one counter of steps.
        failures: For each run, in the order of their ids: the rank that its summary names as the first one to fail, and
            how, as in "1 ValueError"; "-" for none, as after an attempt that has succeeded.
    """

    fault: str
    scenario: Scenario
    exit_codes: tuple[int, ...]
    state: str
    within_s: float | None = None
    kept: str = "server"
    log_within_s: float = 1.0
    restarts: int | None = None
    one_writer: bool = True
    failures: tuple[str, ...] = ("-",)

    @property
    def tier(self) -> str:
        """The mark of a case that the default tier leaves out: another case stands for it there, or it takes long."""
        return "wide" if self.fault in WIDE else "" if self.fault in DEFAULT_TIER else "full"

    def run(self, directory: Path) -> Outcome:
        with job(directory) as started:
            return self.scenario(started)

    def wrong(self, found: Outcome) -> list[str]:
        """What is not as it must be."""
        kept = found.arrived if self.kept == "server" else found.local
        if self.kept == "killed":
            kept |= found.fresh
        within_s = None if self.within_s is None else self.within_s * jobs.TIME_SCALE
        late = within_s is not None and (found.seconds is None or found.seconds > within_s)
        checks = {
            f"exit codes {found.exit_codes}, not {self.exit_codes}": found.exit_codes != self.exit_codes,
            f"state {found.state}, not {self.state}": found.state not in self.state.split(" or "),
            f"failures {found.failures}, not {self.failures}": found.failures not in ((), self.failures),
            "a failure without its text, or with a key": not found.told,
            f"{len(found.logged - kept)} of {len(found.logged)} rows lost": not found.logged <= kept,
            f"{found.duplicates} rows twice": found.duplicates > 0,
            f"steps {found.steps}": self.one_writer and sorted(found.steps) != list(range(len(found.steps))),
            f"ended after {found.seconds} s, not {within_s}": late,
            f"a log took {found.slowest_log_s} s": found.slowest_log_s > self.log_within_s * jobs.TIME_SCALE,
            f"still running: {found.leaked}": found.leaked != (),
            f"config {found.config}": self.restarts
            not in (None, found.config.get("tracking_init", {}).get("restart_count")),
        }
        return [text for text, is_wrong in checks.items() if is_wrong]


def alone(how: str, **settings: Any) -> Scenario:
    """One process that ends by itself."""

    def scenario(job: Job) -> Outcome:
        job.start(python(), **ends(how, **settings))
        return job.outcome()

    return scenario


def signalled(number: int, how: str, **settings: Any) -> Scenario:
    """One process that is sent a signal while it does something."""

    def scenario(job: Job) -> Outcome:
        process = job.start(python(), **ends(how, **settings))
        job.wait_for("ready 0 0")
        if how in ("sleep", "lock"):
            job.wait_until_blocked(process.pid)
        elif not settings.get("async"):
            job.log_more(rows=20)
        if number == SIGKILL:
            job.wait_until_stored(FIRST_ROWS)
        job.signal(process.pid, number)
        return job.outcome()

    return scenario


def killed(whom: str, **settings: Any) -> Scenario:
    """One process logs, it or its wandb-core or both are killed, and a new job on the same disk goes on."""

    def scenario(job: Job) -> Outcome:
        process = job.start(python(), **ends("loop", attempts=9, **settings))
        (pid,) = job.wait_for("ready 0 0")
        job.log_more(rows=20)
        if "core" in whom:
            for core in job.pids("wandb-core"):
                job.signal(core, SIGKILL)
        if whom == "core":
            job.log_more(rows=20)
        job.signal(pid, SIGKILL)
        process.communicate()
        job.start(python(), **ends("return", **settings))
        return job.outcome()

    return scenario


def during_init(job: Job) -> Outcome:
    with job.server.failing(Fault.slow(1)) as fault:
        process = job.start(python(), **ends("loop"))
        job.wait_until(lambda: fault.hits, "no request has come")
        job.signal(process.pid)
        return job.outcome()


def during_finish(job: Job) -> Outcome:
    process = job.start(python(), **ends("until go"))
    job.wait_for("ready 0 0")
    with job.server.failing(Fault.slow(1.5, only="filestream")) as fault:
        job.go()
        job.wait_for("returns")
        job.wait_until(lambda: fault.hits, "no request has come")
        job.signal(process.pid)
        return job.outcome()


def together(how: dict[str, str], *options: str, command: list[str] | None = None, **settings: Any) -> Scenario:
    """Two ranks, which are told to end when both are under way."""

    def scenario(job: Job) -> Outcome:
        job.start(command or torchrun(*options), **ends(how, **settings))
        for rank in (0, 1):
            job.wait_for(f"ready {rank} 0")
        job.go()
        return job.outcome()

    return scenario


def of_ranks(how: dict[str, str], *options: str, **settings: Any) -> Scenario:
    """Two ranks that end by themselves."""

    def scenario(job: Job) -> Outcome:
        job.start(torchrun(*options), **ends(how, **settings))
        return job.outcome()

    return scenario


def rank_signalled(
    rank: int, number: int, how: dict[str, str], command: list[str] | None = None, **more: Any
) -> Scenario:
    """Two ranks, one of which is sent a signal."""

    def scenario(job: Job) -> Outcome:
        job.start(command or torchrun(), **ends(how, **more))
        victim = wait_until_under_way(job, how)[rank]
        job.signal(victim, number)
        return job.outcome()

    return scenario


def agent_signalled(number: int, how: dict[str, str], **settings: Any) -> Scenario:
    """Two ranks, whose agent is sent a signal."""

    def scenario(job: Job) -> Outcome:
        agent = job.start(torchrun(), **ends(how, **settings))
        workers = wait_until_under_way(job, how)
        job.signal(agent.pid, number)
        outcome = job.outcome()
        wait_for_end(workers)
        if "os._exit" not in str(settings.get("handler")):  # which leaves the run's end to the next attempt
            job.server.wait_for(lambda: job.server.runs[0].completed, 240)
        return job.outcome() if outcome.exit_codes == () else outcome

    return scenario


def wait_until_under_way(job: Job, how: dict[str, str]) -> list[int]:
    """The processes of both ranks, when each does what it is to be interrupted in."""
    pids = [pid for rank in (0, 1) for pid in job.wait_for(f"ready {rank} 0")]
    for rank in (0, 1):
        if how.get(str(rank)) == "collective":
            job.wait_for(f"blocked {rank}")
    return pids


def wait_for_end(pids: list[int], timeout_s: float = 240) -> None:
    """Of processes that nobody here has started."""
    until = time.monotonic() + timeout_s
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        assert time.monotonic() < until, f"of {pids}, some go on"
        time.sleep(0.1)


def agent(job: Job, address: str, port: int, host: bool, **settings: Any) -> subprocess.Popen[str]:
    """A node of an elastic job of 1 to 2 nodes. Ranks go by address; only one of the nodes has the store."""
    configuration = f"is_host={int(host)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1", "--rdzv-id=job"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={configuration}"),
        f"--local-addr={address}",
    ]
    command = [*jobs.torchrun(*options), str(ENDS)]
    return job.start(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **PROMPT}, **settings)


def scale_down(**settings: Any) -> Scenario:
    """The node that has rank 0 and the run dies; the other goes on alone, and has them then."""

    def scenario(job: Job) -> Outcome:
        port, how = jobs.free_port(), ends("together", attempts=9, step_s=0.1, **settings)
        agent(job, "127.0.0.2", port, host=True, **how)
        dying = agent(job, "127.0.0.1", port, host=False, **how)
        (rank_0,) = job.wait_for("ready 0 0")
        (rank_1,) = job.wait_for("ready 1 0")
        job.server.wait_for(lambda: len(job.server.runs[0].rows) > FIRST_ROWS, 240)
        job.fault_at = time.monotonic()
        for pid in (dying.pid, rank_0):
            os.kill(pid, signal.SIGKILL)
        until_logged(job, but_not={rank_0, rank_1})
        job.go()
        return job.outcome()

    return scenario


def scale_up(job: Job) -> Outcome:
    """A node comes, and rank 0 and the run move to it."""
    port, how = jobs.free_port(), ends("together", attempts=9, step_s=0.1)
    agent(job, "127.0.0.2", port, host=True, **how)
    (alone,) = job.wait_for("ready 0 0")
    job.fault_at = time.monotonic()
    agent(job, "127.0.0.1", port, host=False, **how)
    until_logged(job, but_not={alone})
    job.go()
    return job.outcome()


def until_logged(job: Job, but_not: set[int], rows: int = FIRST_ROWS + 10) -> None:
    """Wait until a process other than these has logged so many rows."""
    job.wait_until(lambda: max(job.rows_logged(but_not).values(), default=0) >= rows, "nobody has taken over")


def flyte_pod(job: Job) -> Outcome:
    """A Flyte 1 task's pod is told to end."""
    process = job.start(
        flyte1_pods.command("plain", job.directory, module="flyte_scripted"),
        flyte1_pods.environment("plain"),
        **ends("loop"),
    )
    job.wait_for("ready 0 0")
    job.signal(process.pid)
    return job.outcome()


def flyte_retry(job: Job) -> Outcome:
    """Two attempts of a Flyte 1 task's pod; the first one fails."""
    for attempt in (0, 1):
        command = flyte1_pods.command("plain", job.directory, attempt, module="flyte_scripted")
        job.start(command, flyte1_pods.environment("plain", attempt), **ends("raise")).wait(240)
    return job.outcome()


def midway(fault: Fault, seconds: float, ranks: int = 1, **settings: Any) -> Scenario:
    """The server fails for so long, and until every rank has logged rows: no `log` waits for it."""

    def scenario(job: Job) -> Outcome:
        env = {**PROMPT, **(QUICK_RETRIES if seconds < 10 else {})}
        job.start(torchrun(ranks=ranks) if ranks > 1 else python(), env, **ends("until go", **settings))
        for rank in range(ranks):
            job.wait_for(f"ready {rank} 0")
        with job.server.failing(fault):
            until = time.monotonic() + seconds
            job.log_more(rows=20)
            time.sleep(max(0.0, until - time.monotonic()))
        job.log_more(rows=20)
        job.fault_at = time.monotonic()
        job.go()
        return job.outcome()

    return scenario


def down_and_terminated(job: Job) -> Outcome:
    """The server goes, SIGTERM comes, and a handler sets the flag that ends the loop."""
    process = job.start(python(), **ends("loop", handler="flag", tracking={"kill_after_s": 4}))
    job.wait_for("ready 0 0")
    with job.server.failing(Fault.refuse()):
        job.signal(process.pid)
        return job.outcome()


def unavailable(fault: Fault | None, if_unavailable: str = "raise", init_timeout_s: float = 3, **env: str) -> Scenario:
    """The server cannot be used when the run is opened."""

    def scenario(job: Job) -> Outcome:
        tracking = {"init_timeout_s": init_timeout_s, "if_unavailable": if_unavailable, "id": jobs.RUN_ID}
        with job.server.failing(fault) if fault else contextlib.nullcontext():
            job.fault_at = time.monotonic()
            job.start(python(), env, **ends("return", tracking=tracking))
            return job.outcome()

    return scenario


def down_to_the_end(fault: Fault) -> Scenario:
    """The server fails from the middle of the run on."""

    def scenario(job: Job) -> Outcome:
        job.start(python(), **ends("until go", tracking={"kill_after_s": 4}))
        job.wait_for("ready 0 0")
        with job.server.failing(fault):
            job.fault_at = time.monotonic()
            job.go()
            return job.outcome()

    return scenario


def full_disk(job: Job) -> Outcome:
    """W&B's directory can take 300 KiB."""
    limited = ["bash", "-c", 'ulimit -f 300; exec "$@"', "bash", *python()]
    job.start(limited, **ends("loop 3 s", step_s=0.005, value="x" * 2000))
    return job.outcome()


def failure_of_rank_1(fault: str, how: str, exit_code: int, kind: str, run_mode: str = "auto") -> Case:
    """Rank 1 fails, and its agent ends rank 0. The run tells of rank 1."""
    settings: dict[str, Any] = {"torch": True, "tracking": {"run_mode": run_mode, "id": jobs.RUN_ID}}
    rank_0 = "sleep"
    if "destroy" in how:
        rank_0, settings["group"] = "collective at go", True
    scenario = together({"0": rank_0, "1": how}, **settings)
    return Case(fault, scenario, (exit_code,), FAILED, one_writer=run_mode == "auto", failures=(f"1 {kind}",))


PEER = {"0": "collective", "1": "sleep"}
ALL_LOOP, ALL_IN_FINALLY = {"*": "loop"}, {"*": "finally"}
SHARED: dict[str, Any] = {"tracking": {"run_mode": "shared"}, "with_step": True}
# Ranks that need not agree on an id are spared torch, 2 s of CPU each.
GIVEN: dict[str, Any] = {"tracking": {"run_mode": "shared", "id": jobs.RUN_ID}, "with_step": True}
# A job on the same disk goes on with the run.
CHOSEN: dict[str, Any] = {"tracking": {"id": jobs.RUN_ID}}
STEPS: dict[str, Any] = {**CHOSEN, "with_step": True}
SIGTERM, SIGINT, SIGKILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
FAILED, PREEMPTED, FINISHED, RUNNING = "failed", "preempted", "finished", "running"
# The service is told while the handler runs.
RUNNING_OR_PREEMPTING = "running or preempting"

shared = functools.partial(Case, one_writer=False)  # a run with a client in each rank

CASES = [
    Case("returns", alone("return"), (0,), FINISHED),
    Case("exception", alone("raise"), (1,), FAILED, failures=("0 ValueError",)),
    Case("SystemExit(3)", alone("exit 3"), (3,), FAILED, failures=("0 SystemExit",)),
    Case("SIGINT in Python code", signalled(SIGINT, "loop"), (130,), FAILED, 5),
    Case("SIGTERM in Python code", signalled(SIGTERM, "loop"), (143,), PREEMPTED, 5),
    Case("SIGTERM, and rows in `finally`", signalled(SIGTERM, "finally"), (143,), PREEMPTED, 5),
    Case("SIGTERM in a tight loop of `log`", signalled(SIGTERM, "loop", step_s=0), (143,), PREEMPTED, 5),
    Case("SIGTERM in `time.sleep`", signalled(SIGTERM, "sleep"), (143,), PREEMPTED, 5),
    Case("SIGTERM in a lock", signalled(SIGTERM, "lock"), (143,), PREEMPTED, 5),
    Case("SIGTERM in an async function", signalled(SIGTERM, "loop", **{"async": True}), (143,), PREEMPTED, 5),
    Case(
        "SIGTERM in a nested function",
        signalled(SIGTERM, "loop", nested=True),
        (143, 143),
        PREEMPTED,
        5,
        failures=("-", "-"),
    ),
    Case("SIGTERM, a handler that sets a flag", signalled(SIGTERM, "loop", handler="flag"), (143,), PREEMPTED, 5),
    Case("SIGTERM, a handler that raises", signalled(SIGTERM, "loop", handler="raise"), (143,), PREEMPTED, 5),
    Case("SIGTERM, a handler that exits", signalled(SIGTERM, "sleep", handler="exit 5"), (143,), PREEMPTED, 5),
    Case(
        "SIGTERM, a handler with `os._exit`",
        signalled(SIGTERM, "loop", handler="os._exit 6"),
        (),
        RUNNING_OR_PREEMPTING,
        5,
        kept="killed",
    ),
    Case(
        "SIGTERM, a handler installed inside",
        signalled(SIGTERM, "loop", handler_inside="flag"),
        (143,),
        PREEMPTED,
        5,
    ),
    Case("SIGTERM while the run is opened", during_init, (143,), PREEMPTED, 20),
    Case("SIGTERM while the run is ended", during_finish, (0,), FINISHED, 20),
    Case("SIGKILL of the writer", signalled(SIGKILL, "loop"), (), RUNNING, 5, "killed"),
    Case("SIGKILL of the writer, a new job", killed("writer", **CHOSEN), (0,), FINISHED),
    Case("SIGKILL of the writer, a new job from its checkpoint", killed("writer", **STEPS), (0,), FINISHED),
    Case("SIGKILL of the writer and wandb-core, a new job", killed("writer, core", **CHOSEN), (0,), FINISHED),
    Case("SIGKILL of wandb-core, then of the writer, a new job", killed("core", **STEPS), (0,), FINISHED),
    Case("exception on rank 0", of_ranks({"0": "raise", "1": "sleep"}), (1,), FAILED, failures=("0 ValueError",)),
    failure_of_rank_1("exception on another rank", "raise at go", 1, "ValueError"),
    failure_of_rank_1("`os._exit(7)` on another rank", "os._exit 7 at go", 7, "exit"),
    failure_of_rank_1("segmentation fault on another rank", "segfault at go", 139, "SIGSEGV"),
    failure_of_rank_1(
        "another rank's exception after its collectives are cut", "destroy, raise at go", 1, "ValueError"
    ),
    failure_of_rank_1("shared: exception on another rank", "raise at go", 1, "ValueError", run_mode="shared"),
    Case("SIGTERM in a gloo collective", rank_signalled(0, SIGTERM, PEER), (143,), PREEMPTED),
    Case(
        "SIGKILL of another rank",
        rank_signalled(1, SIGKILL, {"0": "sleep", "1": "sleep"}),
        (137,),
        FAILED,
        failures=("1 SIGKILL",),
    ),
    # Its agent looks every 30 s, so that the collective's error comes before the agent's SIGTERM.
    Case(
        "SIGKILL of the peer of a collective",
        rank_signalled(1, SIGKILL, PEER, torchrun("--monitor-interval=30")),
        (137,),
        FAILED,
        failures=("1 SIGKILL",),
    ),
    Case("SIGTERM of the agent", agent_signalled(SIGTERM, PEER), (143,), PREEMPTED),
    Case("SIGKILL of the agent", agent_signalled(SIGKILL, {"*": "loop 3 s"}), (0,), FINISHED),
    Case(
        "Flyte Elastic, spawn: SIGTERM in a collective",
        rank_signalled(0, SIGTERM, PEER, flyte()),
        (143,),
        PREEMPTED,
    ),
    Case(
        "one restart",
        of_ranks({"0": "raise", "1": "sleep"}, "--max-restarts=1"),
        (1, 0),
        FINISHED,
        restarts=1,
    ),
    Case("elastic 1:2, the node of rank 0 dies", scale_down(), (0,), FINISHED, kept="killed"),
    Case("elastic 1:2, rank 0 moves to a node that comes", scale_up, (143, 0), FINISHED),
    Case("Flyte pod: SIGTERM", flyte_pod, (143,), PREEMPTED, 8),
    Case("Flyte retry", flyte_retry, (1, 0), FINISHED),
    Case("server refuses at the start", unavailable(Fault.refuse()), (), "", 7),
    Case("server mute at the start", unavailable(Fault.mute()), (), "", 7),
    Case("bad API key", unavailable(None, init_timeout_s=60, WANDB_API_KEY="0" * 40), (), "", 4),
    Case("server mute at the start, degrade", unavailable(Fault.mute(), "degrade"), (), "", 8, "local file"),
    Case("server down for 20 s", midway(Fault.refuse(), 20), (0,), FINISHED, 20),
    Case("server down for 45 s", midway(Fault.refuse(), 45), (0,), FINISHED, 20),
    Case("server answers 500 for 6 s", midway(Fault.status(500), 6), (0,), FINISHED),
    Case("server mute for 6 s", midway(Fault.mute(), 6), (0,), FINISHED),
    Case("server gone at the end", down_to_the_end(Fault.refuse()), (), RUNNING, 5, kept="local file"),
    Case("server gone, SIGTERM, a handler with a flag", down_and_terminated, (), RUNNING, 6, "local file", 6),
    Case("full disk", full_disk, (0,), FINISHED),
    Case("1 MB of config", alone("return", config_bytes=1_000_000), (0,), FINISHED),
    Case("NaN and infinity", alone("return", value=float("nan")), (0,), FINISHED),
    Case("rows as fast as it goes, for 10 s", alone("fast", rows=0), (0,), FINISHED),
    shared(
        "shared: SIGTERM, and rows in `finally`", agent_signalled(SIGTERM, ALL_IN_FINALLY, **GIVEN), (143,), PREEMPTED
    ),
    shared("shared: SIGTERM, rank 0 in a collective", agent_signalled(SIGTERM, PEER, **SHARED), (143,), PREEMPTED),
    shared(
        "shared: SIGKILL of a neighbour",
        rank_signalled(1, SIGKILL, ALL_LOOP, **GIVEN),
        (137,),
        FAILED,
        kept="killed",
        failures=("1 SIGKILL",),
    ),
    shared(
        "shared: SIGKILL of the writer, restart",
        rank_signalled(0, SIGKILL, ALL_LOOP, torchrun("--max-restarts=1"), **GIVEN),
        (0,),
        FINISHED,
        restarts=1,
    ),
    shared(
        "shared, elastic 1:2, the node of rank 0 dies",
        scale_down(**SHARED),
        (0,),
        FINISHED,
        kept="killed",
    ),
    shared("shared: server down for 20 s", midway(Fault.refuse(), 20, ranks=2, **GIVEN), (0,), FINISHED, 25),
]

# At least one case of each kind of fault, of each launcher and of each mode.
DEFAULT_TIER = frozenset(
    {
        "exception",
        "SIGTERM in `time.sleep`",
        "SIGTERM, a handler that sets a flag",
        "SIGTERM while the run is ended",
        "SIGKILL of the writer, a new job from its checkpoint",
        "exception on another rank",
        "SIGTERM in a gloo collective",
        "one restart",
        "server refuses at the start",
        "bad API key",
        "server answers 500 for 6 s",
        "NaN and infinity",
    }
)
# For each of them, another case has the same fault: shorter, with another status, in one mode or launcher of two.
WIDE = frozenset(
    {
        "SIGKILL of the peer of a collective",
        "shared: SIGKILL of the writer, restart",
        "SIGKILL of the agent",
        "full disk",
        "elastic 1:2, the node of rank 0 dies",
        "rows as fast as it goes, for 10 s",
        "shared: exception on another rank",
        "another rank's exception after its collectives are cut",
        "SIGKILL of the writer and wandb-core, a new job",
        "shared: SIGTERM, and rows in `finally`",
        "server mute at the start",
        "server mute for 6 s",
        "SIGKILL of the writer, a new job",
        "server down for 20 s",
        "server down for 45 s",
        "SIGKILL of wandb-core, then of the writer, a new job",
        "elastic 1:2, rank 0 moves to a node that comes",
        "shared, elastic 1:2, the node of rank 0 dies",
        "shared: server down for 20 s",
    }
)
assert {case.fault for case in CASES} >= DEFAULT_TIER | WIDE
