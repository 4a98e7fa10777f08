"""The contract of every tracker: the same jobs of 4 ranks under real torchrun, and what each service stored."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support import jobs
from support.backends import BACKENDS, Backend, Kept
from support.waiting import wait_until

RANKS = 4
CONFORM = jobs.PROGRAMS / "conformance_job.py"


# The default tier has W&B and a third party's tracker.
OF_ALL = [pytest.param(name, marks=() if name in ("wandb", "jsonl") else pytest.mark.wide) for name in BACKENDS]


@pytest.fixture(scope="module", params=OF_ALL)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with BACKENDS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


def default_for(*names: str, full: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A test of all trackers, which the default tier runs with these, `make test-all` with those of `full` too.

    `make test-wide` has the other ones: each tracker has some of these tests in `make test-all`, and its modes.
    """
    left = {name: pytest.mark.full if name in full else pytest.mark.wide for name in BACKENDS if name not in names}
    params = [pytest.param(name, marks=left.get(name, ())) for name in BACKENDS]
    return pytest.mark.parametrize("backend", params, indirect=True, scope="module")


class Job:
    """`conformance_job.py` under torchrun."""

    def __init__(self, backend: Backend, directory: Path, scenario: str, *options: str, nodes: int = 1) -> None:
        self.backend = backend
        self.directory = directory
        self.project = (
            f"{scenario.replace(' ', '-')}-{secrets.token_hex(3)}"  # no other test's, whose run would be this one too
        )
        meeting = ["--standalone"]
        if nodes > 1:
            meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{jobs.free_port()}"]
        agent = jobs.torchrun(*meeting, f"--nproc-per-node={RANKS // nodes}", "--monitor-interval=0.1", *options)
        script = [str(CONFORM), scenario, backend.name, backend.package, self.project]
        env = backend.environment()
        if scenario == "missing":
            env = backend.missing(directory)
            script += ["degrade"] if backend.can_degrade else []
        if scenario == "pulse":  # with GPUs
            others = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(jobs.PROGRAMS / "nvml"), others]))
        self.agents = [jobs.start([*agent, *script], directory, env) for _ in range(nodes)]
        self.process = self.agents[0]

    @property
    def runs(self) -> list[Kept]:
        return self.backend.runs(self.project)

    def notes(self) -> list[list[str]]:
        return [line.split() for path in self.directory.glob("notes-*") for line in path.read_text().splitlines()]

    def wait_until_all_log(self) -> None:
        """Until each rank has logged 25 rows."""

        def have_logged() -> bool:
            rows = Counter(key for key, _ in self.logged())
            return len(rows) == RANKS and min(rows.values()) >= 25

        wait_until(have_logged, self.process)

    def pid(self, rank: int) -> int:
        (path,) = (path for path in self.directory.glob("notes-*") if f"ready {rank} 0" in path.read_text())
        return int(path.name.removeprefix("notes-"))

    def ended(self) -> jobs.Done:
        done = [jobs.finish(agent, self.directory, timeout_s=150) for agent in self.agents]
        return jobs.Done(max(one.returncode for one in done), "\n".join(one.output for one in done), self.directory)

    def logged(self, what: str = "logged") -> Counter[tuple[str, int]]:
        """The rows that the ranks have noted until now: before each call of `log` as "logs", after it as "logged"."""
        logs = [note for note in self.notes() if note[0] == what]
        return Counter((f"rank{rank}", int(number)) for _, rank, number in logs)

    def has_all(self, points: Counter[tuple[str, int]]) -> bool:
        """Whether `points` are what was logged, each once.

        A signal may come after a row is on its way and before `log` has returned: such a row may be there or not.
        """
        return self.logged() <= points <= self.logged("logs")


def test_the_doctor_reports_whether_the_service_can_be_used(backend, tmp_path):
    for variables, is_there in ((backend.environment(), True), (backend.missing(tmp_path), False)):
        command = ["-m", "flyteplugins_tracking", "--json", "--tracker", backend.name]
        done = jobs.python(tmp_path, *command, env=variables)
        (state,) = json.loads(done.output)["trackers"]
        assert state["version"] is not None
        assert state["reachable"] in (is_there, None)
        # The example of a third party's tracker tells nothing.
        assert done.returncode == int(not is_there and backend.can_degrade), done.output


def expected_runs(mode: str, scope: str) -> dict[str, tuple[str, set[int]]]:
    """The group and the writing ranks of each run, by its id."""
    base = f"{mode}-{scope}"
    suffix = "-worker-0" if scope == "worker" else ""
    if mode == "new":
        return {f"{base}{suffix}-rank-{rank}": (base + suffix, {rank}) for rank in range(RANKS)}
    return {base + suffix: (base if suffix else "", {0} if mode == "auto" else set(range(RANKS)))}


def test_a_job_in_each_mode_and_scope_that_ends_with_an_exception(backend, tmp_path, subtests):
    job = Job(backend, tmp_path, "modes")
    done = job.ended()
    assert done.returncode != 0
    assert "made to fail" in done.output
    runs = {run.id: run for run in job.runs}
    for mode in ("auto", "new", "shared"):
        for scope in ("global", "worker"):
            with subtests.test("each run has its rows once", mode=mode, scope=scope):
                check_runs(job, runs, mode, scope)
    with subtests.test("a rank without a run loads nothing of the vendor"):
        in_auto = [line[3:6] for line in job.notes() if line[:2] == ["ran", "auto"]]
        assert sorted(in_auto) == sorted(
            [["0", "True", str(backend.package != "")], *([str(r), "False", "False"] for r in range(1, RANKS))] * 2
        )
    with subtests.test("an exception is a failure"):
        failed = runs["failing"]
        assert (len(failed.points), {key for key, _ in failed.points}) == (20, {"rank0"})
        assert (failed.status, failed.ends or 1) == ("failed", 1)


def check_runs(job: Job, runs: dict[str, Kept], mode: str, scope: str) -> None:
    expected = expected_runs(mode, scope)
    assert {run_id for run_id in runs if run_id.startswith(f"{mode}-{scope}")} == set(expected)
    for run_id, (group, ranks) in expected.items():
        logged: Counter[tuple[str, int]] = Counter()
        for _, _, _, rank, has_run, _, first, last in (
            line for line in job.notes() if line[0] == "ran" and line[1:3] == [mode, scope] and int(line[3]) in ranks
        ):
            assert has_run == "True"
            logged.update((f"rank{rank}", number) for number in range(int(first), int(last)))
        assert len(logged) == len(ranks) * (500 if mode == "shared" else 5)
        assert runs[run_id].points == logged
        assert (runs[run_id].status, runs[run_id].ends or 1, runs[run_id].group) == ("finished", 1, group)
        assert runs[run_id].config["lr"] == 0.1
        assert runs[run_id].config["tracking_init"]["restart_count"] == 0
        assert runs[run_id].config["tracking_init"]["world_size"] == RANKS


@default_for(full=("mlflow",))  # the fault matrix has a restart
def test_a_restart_continues_the_run(backend, tmp_path):
    job = Job(backend, tmp_path, "restart", "--max-restarts=1")
    done = job.ended()
    assert done.returncode == 0, done.output
    (run,) = job.runs
    assert job.has_all(run.points)
    assert {number >= 10_000 for _, number in run.points} == {True, False}
    assert (run.status, run.ends or 2, run.config["tracking_init"]["restart_count"]) == ("finished", 2, 1)
    said = {(attempt, resumed) for what, attempt, resumed in (n for n in job.notes() if n[0] == "resumed")}
    assert ("1", "False") not in said, said


@pytest.mark.full
@default_for("wandb")
def test_the_pulse_and_the_load_of_all_nodes_join_the_rows_of_the_function(backend, tmp_path):
    job = Job(backend, tmp_path, "pulse", nodes=2)
    done = job.ended()
    assert done.returncode == 0, done.output
    (run,) = job.runs
    pulse = ("ranks/", "nodes/")
    own = Counter({point: count for point, count in run.points.items() if not point[0].startswith(pulse)})
    assert own == job.logged()
    values = {key: value for key, value in run.points if key.startswith(pulse)}
    assert values["ranks/slowest"] in range(RANKS)
    assert {"ranks/silent", "ranks/memory/max"} <= values.keys()
    for node in (0, 1):
        of_node = {key.removeprefix(f"nodes/{node}/"): value for key, value in values.items()}
        assert 0 <= of_node["cpu"] <= 100
        assert 0 <= of_node["memory"] <= 100
        assert [of_node[f"gpu/{gpu}/util"] for gpu in (0, 1)] == [50 + node, 0]
        assert [of_node[f"gpu/1/{name}"] for name in ("memory", "power_w", "temp_c")] == [25, 300, 60]
    assert not [key for key in values if key.startswith("nodes/2/")]
    initialised = sorted(path.name for path in tmp_path.glob("nvml-*"))
    assert initialised == ["nvml-0", "nvml-2"]  # local rank 0 of each node
    assert run.status == "finished"


@default_for(full=("pluto",))  # the fault matrix has these signals
def test_sigterm_ends_the_run_with_all_its_rows(backend, tmp_path):
    job = Job(backend, tmp_path, "sigterm")
    job.wait_until_all_log()
    os.kill(job.process.pid, signal.SIGTERM)
    done = job.ended()
    assert done.returncode != 0
    (run,) = job.runs
    assert job.has_all(run.points), done.output
    assert (run.status, run.ends or 1) == ("killed", 1), done.output


@default_for(full=("trackio",))
def test_when_another_rank_is_killed_the_others_lose_nothing(backend, tmp_path):
    job = Job(backend, tmp_path, "sigkill")
    job.wait_until_all_log()
    early = job.logged()
    with suppress(AssertionError):  # W&B's client is another process, which sends the rows also later
        wait_until(lambda: any(early <= run.points for run in job.runs), timeout_s=2 * jobs.TIME_SCALE)
    os.kill(job.pid(RANKS - 1), signal.SIGKILL)
    done = job.ended()
    assert done.returncode != 0
    (run,) = job.runs
    killed = f"rank{RANKS - 1}"
    lost = job.logged() - run.points
    assert {key for key, _ in lost} <= {killed}, done.output
    assert lost.keys().isdisjoint(early)
    assert run.points <= job.logged("logs")  # nothing twice
    assert (run.status, run.ends or 1) == ("failed", 1), done.output  # of that rank, and not preempted


@default_for("jsonl")  # of W&B: `test_unavailable_jobs.py`
def test_an_absent_service_raises_or_the_run_is_logged_to_files(backend, tmp_path):
    job = Job(backend, tmp_path, "missing")
    done = job.ended()
    assert done.returncode == 0, done.output
    refused = [line[1:] for line in job.notes() if line[0] == "refused"]
    assert [name for name, _ in refused] == ["TrackerUnavailableError"] * RANKS
    assert max(float(seconds) for _, seconds in refused) < 3 * jobs.TIME_SCALE + 15  # init_timeout_s=15
    assert job.runs == []
    if not backend.can_degrade:
        return
    (command,) = {match[1] for match in re.finditer(r"(?:is available, run|answers): (.+)$", done.output, re.MULTILINE)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    sent = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env={**jobs.environment(tmp_path, **backend.environment()), "PATH": path},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert sent.returncode == 0, sent.stdout + sent.stderr
    (run,) = job.runs
    assert run.points == job.logged() == job.logged("logs")
    assert (run.status, run.config["lr"]) == ("finished", 0.1)
