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


# The variables of a launcher, the steps of a program, and who the last of its processes is, of which rank.
LINEAGES = [
    (RANK_1, "fork", CHILD, 1),
    (RANK_1, "spawn fork", CHILD, 1),
    (RANK_1, "call fork exec", CHILD, 1),
    # A wrapper: it has called nothing.
    (RANK_1, "exec", RANK, 1),
    # They set their own variables inside, as Elastic's workers do.
    (RANK_1, f"fork {SET_RANK_2}", RANK, 2),
    (RANK_1, f"call exec {SET_RANK_2}", RANK, 2),
    # A launcher in a rank.
    (RANK_1, f"call {SET_RANK_2} exec", RANK, 2),
    # A script that starts ranks by hand, and sets the variables of each before.
    ({}, f"{SET_RANK_1} fork", RANK, 1),
    # A worker of Elastic or of `mp.spawn`, and what it starts.
    ({}, f"fork {SET_RANK_1}", RANK, 1),
    ({}, f"fork fork {SET_RANK_1}", RANK, 1),
    ({}, f"fork {SET_RANK_1} fork", CHILD, 1),
    ({}, f"spawn {SET_RANK_1} call exec", CHILD, 1),
]


@pytest.mark.parametrize(("variables", "steps", "who", "rank"), LINEAGES)
def test_the_last_process_is_the_rank_or_a_child_of_it(tmp_path: Path, variables, steps, who, rank) -> None:
    assert last_of(steps, tmp_path, **variables) == {RANK: None, CHILD: None, "seen": rank, who: rank}


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
