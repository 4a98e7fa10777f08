"""Run a Flyte 2 task as its pod would: serialized inputs in, `outputs.pb` or `error.pb` out."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from programs import flyte2_pod

from support import jobs

POD, LOCAL = jobs.PROGRAMS / "flyte2_pod.py", jobs.PROGRAMS / "flyte2_local.py"


@dataclass(frozen=True)
class Error:
    """The error that a failed task left in `error.pb`."""

    code: str
    message: str


@dataclass(frozen=True)
class Ended(jobs.Done):
    """A pod that has ended.

    Attributes:
        outputs: The values of `outputs.pb` in their order; None where the task left none.
    """

    outputs: list[Any] | None
    error: Error | None


def command(task: str, directory: Path, attempt: int, run: str, action: str, module: str) -> list[str]:
    """`a0` for `{module}.{task}`, with the paths that the backend would give it."""
    args = ["a0", "--inputs", "{{.input}}", "--outputs-path", "{{.outputPrefix}}", "--version", "v1"]
    args += ["--raw-data-path", "{{.rawOutputDataPrefix}}", "--checkpoint-path", "{{.checkpointOutputPrefix}}"]
    args += [
        "--prev-checkpoint",
        "{{.prevCheckpointPrefix}}",
        "--run-name",
        "{{.runName}}",
        "--name",
        "{{.actionName}}",
    ]
    program = find_spec("flyte._bin.runtime")
    assert program is not None
    assert program.origin is not None
    if "--run-start-time" in Path(program.origin).read_text():  # the first versions do not know it
        args += ["--run-start-time", "{{.runStartTime}}"]
    args += ["--resolver", "flyte._internal.resolvers.default.DefaultTaskResolver"]
    args += ["mod", module, "instance", task]
    return flyte2_pod.command(args, base(directory, run), run, action, attempt)


def base(directory: Path, run: str) -> Path:
    """Where the actions of a run keep their inputs and outputs."""
    return directory / "runs" / run


def run(
    task: str,
    directory: Path,
    attempt: int = 0,
    run: str = "r1",
    action: str = "a0",
    **options: Any,
) -> Ended:
    """Run one pod to its end: see `start`."""
    pod = start(task, directory, attempt, run, action, **options)
    return ended(jobs.finish(pod, directory), attempt, run, action)


def start(
    task: str,
    directory: Path,
    attempt: int = 0,
    run: str = "r1",
    action: str = "a0",
    context: Mapping[str, str] | None = None,
    module: str = "flyte2_tracked",
    children: bool = False,
    node: int = 0,
    **env: str,
) -> subprocess.Popen[str]:
    """Start one pod, for a test that does something to it: `ended` reads what it left.

    With `children` its child tasks are pods too; without, it has no controller.
    """
    where = base(directory, run) / action
    Path(where, str(attempt + 1)).mkdir(parents=True, exist_ok=True)
    Path(where, "inputs.pb").write_bytes(serialized(context or {}))
    place_code(directory)
    variables = {
        **flyte2_pod.pod_environment(run, action, attempt, node),
        "_U_RUN_BASE": str(base(directory, run)),
        "PYTHONPATH": jobs.search_path(jobs.PROGRAMS),
        **({"POD_CHILDREN": "processes"} if children else {}),
        **env,
    }
    return jobs.start(command(task, directory, attempt, run, action, module), directory, variables)


def nodes(task: str, directory: Path, count: int = 2, **options: Any) -> Ended:
    """The pods of one Elastic task, each a node; they share the place of their outputs, as on a cluster."""
    endpoint = f"127.0.0.1:{jobs.free_port()}"
    pods = [start(task, directory, node=node, PET_RDZV_ENDPOINT=endpoint, **options) for node in range(count)]
    done = [jobs.finish(pod, directory, 240) for pod in pods]
    both = jobs.Done(max(d.returncode for d in done), "\n".join(d.output for d in done), directory)
    return ended(both, options.get("attempt", 0), options.get("run", "r1"), options.get("action", "a0"))


def local(
    task: str,
    directory: Path,
    run: str = "r1",
    context: Mapping[str, str] | None = None,
    module: str = "flyte2_tracked",
    **env: str,
) -> Ended:
    """`flyte.run` of a task in local mode; a failure is in the output alone, as it is for its user."""
    directory.mkdir(parents=True, exist_ok=True)
    place_code(directory)
    arguments = {"module": module, "task": task, "name": run, "directory": str(directory)}
    given = json.dumps({**arguments, "context": dict(context or {})})
    done = jobs.python(directory, LOCAL, given, env={"PYTHONPATH": jobs.search_path(jobs.PROGRAMS), **env})
    outputs = directory / "outputs.json"
    return Ended(
        done.returncode,
        done.output,
        directory,
        outputs=json.loads(outputs.read_text()) if outputs.exists() else None,
        error=None,
    )


def ended(done: jobs.Done, attempt: int = 0, run: str = "r1", action: str = "a0") -> Ended:
    """`done` with what an action's attempt left behind: of a child too, whose action is a directory of the run."""
    errors_pb2 = flyte2_pod.errors_pb2()
    where = base(done.directory, run) / action / str(attempt + 1)
    outputs, error = where / "outputs.pb", where / "error.pb"
    failure = None
    values = outputs_at(where) if outputs.exists() else None
    if error.exists():
        found = errors_pb2.ErrorDocument.FromString(error.read_bytes()).error
        failure = Error(found.code, found.message)
    return Ended(done.returncode, done.output, done.directory, outputs=values, error=failure)


def outputs_at(where: Path) -> list[Any]:
    """The values of the `outputs.pb` there."""
    from flyteidl2.task.common_pb2 import Outputs

    return [native(named.value) for named in Outputs.FromString(Path(where, "outputs.pb").read_bytes()).literals]


def serialized(context: Mapping[str, str]) -> bytes:
    """`inputs.pb`: `n` as the SDK converts it, and the context that the run was started with."""
    from flyte.types import TypeEngine
    from flyteidl2.core.literals_pb2 import KeyValuePair
    from flyteidl2.task.common_pb2 import Inputs, NamedLiteral

    literal = asyncio.run(TypeEngine.to_literal(1, int, TypeEngine.to_literal_type(int)))
    pairs = [KeyValuePair(key=key, value=value) for key, value in context.items()]
    serialized: bytes = Inputs(literals=[NamedLiteral(name="n", value=literal)], context=pairs).SerializeToString()
    return serialized


def native(literal: Any) -> Any:
    """A literal's value: of a file or directory its uri."""
    which = literal.WhichOneof("value")
    if which == "collection":
        return [native(item) for item in literal.collection.literals]
    if which == "map":
        return {key: native(value) for key, value in literal.map.literals.items()}
    scalar = literal.scalar
    kind = scalar.WhichOneof("value")
    if kind == "primitive":
        return getattr(scalar.primitive, scalar.primitive.WhichOneof("value"))
    if kind == "blob":
        return scalar.blob.uri
    if kind == "binary":
        import msgpack

        return msgpack.loads(scalar.binary.value)
    return None


def place_code(directory: Path) -> None:
    """The modules of the tasks in the pod's working directory, where an image or a code bundle has them."""
    for module in jobs.PROGRAMS.glob("*.py"):
        shutil.copy(module, directory)
