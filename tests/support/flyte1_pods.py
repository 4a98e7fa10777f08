"""Run a Flyte 1 task as its pod would: serialized inputs in, `outputs.pb` or `error.pb` out."""

from __future__ import annotations

import sys
from pathlib import Path

from support import jobs

EXECUTION, NODE = "f7c3a", "n0"


def command(
    task: str, directory: Path, attempt: int = 0, name: str | None = None, module: str = "flyte_tasks"
) -> list[str]:
    """`pyflyte-execute` for `{module}.{task}`, with the paths that the backend would give it."""
    name = name or f"{EXECUTION}-{NODE}-{attempt}"
    return [
        str(Path(sys.executable).with_name("pyflyte-execute")),
        f"--inputs={_inputs(directory)}",
        f"--output-prefix={directory / 'out'}",
        f"--raw-output-data-prefix={directory / 'raw' / name}",
        f"--checkpoint-path={directory / 'checkpoints'}",
        "--prev-checkpoint=",
        "--resolver=flytekit.core.python_auto_container.default_task_resolver",
        "--",
        "task-module",
        module,
        "task-name",
        task,
    ]


def environment(task: str, attempt: int = 0, execution: str = EXECUTION, **more: str) -> dict[str, str]:
    """The variables that every pod of a backend of version 1 has."""
    return {
        "FLYTE_INTERNAL_EXECUTION_ID": execution,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "proj",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "FLYTE_INTERNAL_TASK_PROJECT": "proj",
        "FLYTE_INTERNAL_TASK_DOMAIN": "development",
        "FLYTE_INTERNAL_TASK_NAME": f"flyte_tasks.{task}",
        "FLYTE_INTERNAL_TASK_VERSION": "v1",
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
        "HOSTNAME": f"{execution}-{NODE}-{attempt}",
        "PYTHONPATH": jobs.search_path(jobs.PROGRAMS),
        **more,
    }


def run(
    task: str, directory: Path, attempt: int = 0, name: str | None = None, module: str = "flyte_tasks", **env: str
) -> jobs.Done:
    return jobs.run(command(task, directory, attempt, name, module), directory, environment(task, attempt, **env))


def _inputs(directory: Path) -> Path:
    from flyteidl.core.literals_pb2 import Literal, LiteralMap, Primitive, Scalar

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "inputs.pb"
    one = Literal(scalar=Scalar(primitive=Primitive(integer=1)))
    path.write_bytes(LiteralMap(literals={"n": one}).SerializeToString())
    return path
