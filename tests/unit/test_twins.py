"""Processes of one parent that have the same rank in their variables."""

from __future__ import annotations

import os
import sys
from subprocess import PIPE, STDOUT, Popen

import pytest

# Reads lines: the decorated function is called at each, and its outcome printed.
PROGRAM = """
import sys
from flyteplugins_tracking._rank.topology import detect
from flyteplugins_tracking._job.twins import refuse_twin
import os
print("ready", flush=True)
for _ in sys.stdin:
    try:
        refuse_twin(detect(os.environ), os.environ)
        print("is the rank", flush=True)
    except Exception as error:
        print(error, flush=True)
"""
SAME = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
REFUSED = "both would be rank"


class Rank:
    def __init__(self, **variables: str) -> None:
        path = os.pathsep.join(sys.path)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **variables}
        self.process = Popen(
            [sys.executable, "-c", PROGRAM], env=env, stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def calls(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("call\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def start():
    ranks: list[Rank] = []

    def started(**variables: str) -> Rank:
        ranks.append(Rank(**variables))
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.end()


@pytest.mark.skipif(sys.platform != "linux", reason="the locks are Linux's")
def test_the_second_process_of_a_parent_with_the_same_rank_is_refused_until_the_first_one_ends(start):
    first, second = start(**SAME), start(**SAME)
    assert first.calls() == first.calls() == "is the rank\n"  # a second decorated function
    assert f"RANK=0 and WORLD_SIZE=2 are set in this process and in another one that process {os.getpid()}" in (
        refusal := second.calls()
    )
    assert REFUSED in refusal
    assert start(**{**SAME, "RANK": "1"}).calls() == "is the rank\n"
    assert start(**{**SAME, "MASTER_PORT": "2"}).calls() == "is the rank\n"  # of another job
    first.end()
    assert second.calls() == "is the rank\n"  # a restart


def test_children_of_a_rank_that_have_inherited_its_variables_are_not_refused(start, monkeypatch):
    from flyteplugins_tracking._job import twins
    from flyteplugins_tracking._rank.info import DistributedInfo
    from flyteplugins_tracking._util import proc

    rank = start(**SAME)
    info = DistributedInfo(0, 2, 0, launcher="env")
    monkeypatch.setattr(twins, "_held", {})  # another test in this process may have been a rank
    assert rank.calls() == "is the rank\n"
    monkeypatch.setattr(os, "getppid", os.getpid)  # this process is a child of the one that has started `rank`
    monkeypatch.setattr(proc, "variables_at_start", lambda _: SAME)
    twins.refuse_twin(info, SAME)
    assert twins._held == {}
