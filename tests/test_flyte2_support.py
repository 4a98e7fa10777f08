"""The support for Flyte 2: pods, the nodes of a job, child pods and local runs are what they claim to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import jobs

pytest.importorskip("flyte", reason="flyte is not installed")
pytest.importorskip("flyteplugins.pytorch", reason="flyteplugins-pytorch is not installed")
from support import pods2


def told(directory: Any, tag: str) -> list[dict[str, Any]]:
    """What the processes of a task were told, by rank."""
    found = [json.loads(path.read_text()) for path in directory.glob(f"{tag}-*.json")]
    return sorted(found, key=lambda report: report["rank"] or "")


@pytest.mark.parametrize("task", ["sync", "coroutine"])
def test_a_pod_reads_its_inputs_and_leaves_its_outputs(tmp_path, task):
    done = pods2.run(task, tmp_path, inputs={"n": 4})
    assert (done.returncode, done.outputs, done.error, done.report) == (0, [5], None, None), done.output


def test_a_pod_is_told_its_attempt_its_names_and_the_context_of_its_run(tmp_path):
    done = pods2.run("context", tmp_path, attempt=2, run="r7", action="a3", context={"k": "v"})
    assert done.outputs is not None, done.output
    seen = json.loads(done.outputs[0])
    assert (seen["attempt"], seen["run"], seen["action"], seen["mode"]) == (2, "r7", "a3", "remote")
    assert seen["context"] == {"k": "v"}
    assert not seen["thread"]  # a sync task is off the main thread


def test_a_failure_is_in_the_error_and_not_in_the_exit_code(tmp_path):
    done = pods2.run("fails", tmp_path)
    assert (done.returncode, done.outputs) == (0, None)
    assert done.error == pods2.Error("ValueError", "USER", True, "no 1")


@pytest.mark.parametrize(("task", "expected"), [("reports", ["main 1", "tab 1"]), ("workers_report", ["tab 1"])])
def test_the_report_of_a_task_and_of_a_worker_is_written(tmp_path, task, expected):
    done = pods2.run(task, tmp_path)
    assert done.report is not None, done.output
    assert all(text in done.report for text in expected)


def test_an_elastic_task_has_real_workers(tmp_path):
    done = pods2.run("workers", tmp_path)
    assert done.outputs == [1], done.output
    assert [(seen["rank"], seen["thread"]) for seen in told(tmp_path, "workers")] == [("0", True), ("1", True)]


def test_two_pods_are_two_nodes_of_one_task(tmp_path):
    done = pods2.nodes("nodes", tmp_path)
    assert (done.returncode, done.error) == (0, None), done.output
    seen = told(tmp_path, "nodes")
    assert [(s["rank"], s["group_rank"]) for s in seen] == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]
    assert len({s["hostname"] for s in seen}) == 2


def test_a_child_task_is_a_pod_of_its_own_and_inherits_the_context(tmp_path):
    done = pods2.run("parent", tmp_path, context={"k": "v"}, children=True)
    assert done.outputs is not None, done.output
    given, changed = json.loads(done.outputs[0])
    (parent,) = told(tmp_path, "parent")
    assert (given["context"], changed["context"]) == ({"k": "v"}, {"k": "v", "more": "yes"})
    assert len({parent["pid"], given["pid"], changed["pid"]}) == 3
    assert len({parent["action"], given["action"], changed["action"]}) == 3
    assert given["run"] == "r1"
    assert pods2.ended(done, action=given["action"]).outputs is not None


def test_children_run_at_the_same_time_as_pods_of_their_kinds(tmp_path):
    done = pods2.run("async_parent", tmp_path, children=True)
    assert done.outputs == [2 + 2 + 1], done.output


def test_a_child_is_retried_as_its_task_says(tmp_path):
    done = pods2.run("retrying_parent", tmp_path, children=True)
    assert done.outputs == [1], done.output
    assert sorted(seen["attempt"] for seen in told(tmp_path, "second_attempt")) == [0, 1]


def test_a_child_with_two_nodes_has_two_pods(tmp_path):
    done = pods2.run("parent_of_nodes", tmp_path, children=True)
    assert done.error is None, done.output
    assert [seen["rank"] for seen in told(tmp_path, "nodes")] == ["0", "1", "2", "3"]


def test_the_failure_of_a_child_fails_its_parent(tmp_path):
    done = pods2.run("failing_parent", tmp_path, children=True)
    assert done.error == pods2.Error("ValueError", "USER", True, "no 1")


@pytest.mark.parametrize("task", ["traces", "traces_async"])
def test_a_trace_needs_a_controller_and_is_found_again_by_the_next_attempt(tmp_path, task):
    alone = pods2.run(task, tmp_path / "alone")
    assert alone.error is not None
    assert "Controller is not initialized" in alone.error.message
    first, second = (pods2.run(task, tmp_path / "children", attempt=n, children=True) for n in range(2))
    assert first.outputs == second.outputs, first.output + second.output  # the directory's name has the first's pid


def test_a_local_run_has_its_children_in_its_own_process(tmp_path):
    done = pods2.local("parent", tmp_path, context={"k": "v"})
    assert done.outputs is not None, done.output
    given, changed = json.loads(done.outputs[0])
    assert (given["mode"], given["context"], changed["context"]) == ("local", {"k": "v"}, {"k": "v", "more": "yes"})
    assert given["pid"] == changed["pid"]
    assert "tab 1" in (pods2.local("reports", tmp_path / "report").report or "")


def test_nothing_of_a_pod_around_the_tests_reaches_a_pod(tmp_path, monkeypatch):
    for name in ("RUN_NAME", "ACTION_NAME", "_U_RUN_BASE", "POD_CHILDREN"):
        monkeypatch.setenv(name, "outer")
    kept = jobs.environment(tmp_path)
    assert not {"RUN_NAME", "ACTION_NAME", "_U_RUN_BASE", "POD_CHILDREN"} & set(kept)
