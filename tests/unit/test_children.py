"""Which of a chain of processes is the rank, and which are its children: by what each was born with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import jobs

from flyteplugins_tracking._rank import children

RANK_1 = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
SET_RANK_1 = "RANK=1,WORLD_SIZE=4,LOCAL_RANK=1"
SET_RANK_2 = "RANK=2,WORLD_SIZE=4,LOCAL_RANK=2"
RANK, CHILD = "rank", "parent"


def last_of(steps: str, directory: Path, **variables: str) -> dict[str, int | None]:
    done = subprocess.run(
        [sys.executable, jobs.PROGRAMS / "lineage.py", *steps.split()],
        env=jobs.environment(directory, **variables, PYTHONPATH=jobs.search_path(jobs.PACKAGE.parent)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int | None] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", {RANK: 1}),
        ("call", {RANK: 1}),
        ("fork", {CHILD: 1}),
        pytest.param("os.fork", {CHILD: 1}, marks=pytest.mark.full),
        ("spawn", {CHILD: 1}),
        pytest.param("forkserver", {CHILD: 1}, marks=pytest.mark.full),
        pytest.param("fork fork", {CHILD: 1}, marks=pytest.mark.full),
        ("spawn fork", {CHILD: 1}),
        pytest.param("call exec", {CHILD: 1}, marks=pytest.mark.full),
        ("call fork exec", {CHILD: 1}),
        # A wrapper: it has called nothing.
        ("exec", {RANK: 1}),
        pytest.param("exec exec", {RANK: 1}, marks=pytest.mark.full),
        pytest.param("exec fork", {CHILD: 1}, marks=pytest.mark.full),
        # They set their own variables inside, as Elastic's workers do.
        (f"fork {SET_RANK_2}", {RANK: 2}),
        pytest.param(f"spawn {SET_RANK_2}", {RANK: 2}, marks=pytest.mark.full),
        (f"call exec {SET_RANK_2}", {RANK: 2}),
        # A launcher in a rank.
        (f"call {SET_RANK_2} exec", {RANK: 2}),
    ],
)
def test_with_the_variables_of_a_launcher(tmp_path: Path, steps: str, expected: dict[str, int]) -> None:
    place = next(iter(expected.values()))
    assert last_of(steps, tmp_path, **RANK_1) == {RANK: None, CHILD: None, "seen": place, **expected}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # A script that starts ranks by hand, and sets the variables of each before.
        (f"{SET_RANK_1} fork", {RANK: 1}),
        pytest.param(f"{SET_RANK_1} spawn", {RANK: 1}, marks=pytest.mark.full),
        (f"{SET_RANK_1} exec", {RANK: 1}),
        # A worker of Elastic or of `mp.spawn`, and what it starts.
        (f"fork {SET_RANK_1}", {RANK: 1}),
        pytest.param(f"spawn {SET_RANK_1}", {RANK: 1}, marks=pytest.mark.full),
        (f"fork {SET_RANK_1} fork", {CHILD: 1}),
        pytest.param(f"fork {SET_RANK_1} spawn", {CHILD: 1}, marks=pytest.mark.full),
        pytest.param(f"spawn {SET_RANK_1} fork", {CHILD: 1}, marks=pytest.mark.full),
        (f"spawn {SET_RANK_1} spawn", {CHILD: 1}),
        (f"spawn {SET_RANK_1} call exec", {CHILD: 1}),
    ],
)
def test_with_variables_that_a_process_sets(tmp_path: Path, steps: str, expected: dict[str, int]) -> None:
    assert last_of(steps, tmp_path) == {RANK: None, CHILD: None, "seen": 1, **expected}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
            True,
        ),
        (["python", "-c", "from multiprocessing.forkserver import main; main(3)"], True),
        (["python", "-c", "from multiprocess.spawn import spawn_main; spawn_main()"], True),
        (["python", "-m", "joblib.externals.loky.backend.popen_loky_posix", "--process-name"], True),
        (["ray::RayTrainWorker"], True),
        (["python", "multiprocessing_trials.py"], False),
        (["python", "train.py", "--launcher=multiprocessing"], False),
    ],
)
def test_a_process_that_python_has_started_is_known_by_its_command_line(monkeypatch, command, expected):
    variables = children.variables_at_birth()
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: SimpleNamespace(pid=7))
    monkeypatch.setattr(children.proc, "variables_at_start", lambda _: {})
    monkeypatch.setattr(children.proc, "command_line", lambda pid: command if pid == 7 else ["launcher"])
    monkeypatch.setattr(children.proc, "parent", lambda _: 3)
    assert children.is_child_of_rank(variables) is expected
