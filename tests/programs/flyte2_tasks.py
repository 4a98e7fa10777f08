"""Flyte 2 tasks of every kind, without a tracker: what a pod gives to each."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import flyte

DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
env = flyte.TaskEnvironment(name="plain")


def seen(tag: str, **more: Any) -> dict[str, Any]:
    """Report what this process knows about itself; also in a file, for workers that return nothing."""
    context = flyte.ctx()
    report = {
        "tag": tag,
        "pid": os.getpid(),
        "thread": threading.current_thread() is threading.main_thread(),
        "rank": os.environ.get("RANK"),
        "group_rank": os.environ.get("GROUP_RANK"),
        "hostname": os.environ.get("HOSTNAME"),
        "action": context.action.name,
        "run": context.action.run_name,
        "attempt": int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")),  # Flyte 2.0 does not say it itself
        "mode": context.mode,
        "context": dict(context.custom_context),
        **more,
    }
    Path(DIRECTORY, f"{tag}-{os.getpid()}.json").write_text(json.dumps(report))
    return report


@env.task
def context(n: int) -> str:
    return json.dumps(seen("context"), sort_keys=True)


@env.task(retries=1)
def second_attempt(n: int) -> int:
    if seen("second_attempt")["attempt"] == 0:
        raise ValueError("the first attempt fails")
    return n


@env.task
def parent(n: int) -> str:
    """A child in the context given to the run, and one in a context of its own."""
    seen("parent")
    given = json.loads(context(n))
    with flyte.custom_context(more="yes"):
        changed = json.loads(context(n))
    return json.dumps([given, changed])


@env.task
def retrying_parent(n: int) -> int:
    return second_attempt(n)
