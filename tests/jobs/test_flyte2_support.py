"""The support for Flyte 2: pods, the nodes of a job, child pods and local runs are what they claim to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import jobs

pytest.importorskip("flyte", reason="flyte is not installed")
pytest.importorskip("flyteplugins.pytorch", reason="flyteplugins-pytorch is not installed")
from support import flyte2_pods


def told(directory: Any, tag: str) -> list[dict[str, Any]]:
    """The reports of a task's processes, by rank."""
    found = [json.loads(path.read_text()) for path in directory.glob(f"{tag}-*.json")]
    return sorted(found, key=lambda report: report["rank"] or "")


@pytest.mark.full
def test_a_child_task_is_a_pod_of_its_own_and_inherits_the_context(tmp_path):
    done = flyte2_pods.run("parent", tmp_path, context={"k": "v"}, children=True)
    assert done.outputs is not None, done.output
    given, changed = json.loads(done.outputs[0])
    (parent,) = told(tmp_path, "parent")
    assert (given["context"], changed["context"]) == ({"k": "v"}, {"k": "v", "more": "yes"})
    assert len({parent["pid"], given["pid"], changed["pid"]}) == 3
    assert len({parent["action"], given["action"], changed["action"]}) == 3
    assert given["run"] == "r1"
    assert flyte2_pods.ended(done, action=given["action"]).outputs is not None


@pytest.mark.full
def test_a_child_is_retried_as_its_task_says(tmp_path):
    done = flyte2_pods.run("retrying_parent", tmp_path, children=True)
    assert done.outputs == [1], done.output
    assert sorted(seen["attempt"] for seen in told(tmp_path, "second_attempt")) == [0, 1]


@pytest.mark.full
def test_a_child_with_two_nodes_has_two_pods(tmp_path):
    done = flyte2_pods.run("parent_of_nodes", tmp_path, module="flyte2_nodes", children=True)
    assert done.error is None, done.output
    assert [seen["rank"] for seen in told(tmp_path, "nodes")] == ["0", "1", "2", "3"]


def test_nothing_of_a_pod_around_the_tests_reaches_a_pod(tmp_path, monkeypatch):
    for name in ("RUN_NAME", "ACTION_NAME", "_U_RUN_BASE", "POD_CHILDREN"):
        monkeypatch.setenv(name, "outer")
    kept = jobs.environment(tmp_path)
    assert not {"RUN_NAME", "ACTION_NAME", "_U_RUN_BASE", "POD_CHILDREN"} & set(kept)
