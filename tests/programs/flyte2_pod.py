"""The container of a Flyte 2 task: its command line is that of `a0`, and `a0` itself runs it.

There is no backend to submit child tasks to. With `POD_CHILDREN=processes` each child is a pod of its own, in another
process; otherwise the task has no controller at all.
"""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENVIRONMENT = dict(os.environ)  # as the container got it: a child sees nothing that its parent sets


def pod_environment(run: str, action: str, attempt: int, node: int = 0) -> dict[str, str]:
    """The variables that every pod of a backend of version 2 has."""
    return {
        "RUN_NAME": run,
        "ACTION_NAME": action,
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
        "FLYTE_INTERNAL_EXECUTION_ID": run,
        "FLYTE_INTERNAL_EXECUTION_PROJECT": "proj",
        "FLYTE_INTERNAL_EXECUTION_DOMAIN": "development",
        "_U_ORG_NAME": "org",
        "_U_EP_OVERRIDE": "localhost:8090",
        "_U_INSECURE": "true",
        "FSSPEC_FILE": '{"auto_mkdir": true}',  # a directory that takes any key, as a bucket does
        "HOSTNAME": f"{run}-{action}-{attempt}" + (f"-worker-{node}" if node else ""),
    }


def command(args: list[str], base: Path, run: str, action: str, attempt: int) -> list[str]:
    """The command of a pod: the arguments of its task with the backend's values in their places."""
    output = base / action / str(attempt + 1)
    before = base / action / str(attempt) / "checkpoint"
    values = {
        "{{.input}}": base / action / "inputs.pb",
        "{{.outputPrefix}}": output,
        "{{.rawOutputDataPrefix}}": output / "raw",
        "{{.checkpointOutputPrefix}}": output / "checkpoint",
        "{{.prevCheckpointPrefix}}": before if attempt else "",
        "{{.runName}}": run,
        "{{.actionName}}": action,
        "{{.runStartTime}}": "2026-01-01T00:00:00Z",
    }
    return [sys.executable, __file__, *(str(values.get(arg, arg)) for arg in args)]


def run_child(action: Any) -> Path:
    """Run the pods of a child action, and again after a failure as often as its task may; the last one's outputs."""
    template = action.task.task_template
    base, run = Path(action.run_output_base), action.action_id.run.name
    own = {variable.key: variable.value for variable in template.container.env}
    own["_U_RUN_BASE"] = str(base)
    count = _replicas(template)
    for attempt in range(template.metadata.retries.retries + 1):
        if count > 1:
            own["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{_free_port()}"
        args = command(list(template.container.args), base, run, action.name, attempt)
        Path(base, action.name, str(attempt + 1)).mkdir(parents=True, exist_ok=True)
        pods = [
            subprocess.Popen(args, env={**ENVIRONMENT, **pod_environment(run, action.name, attempt, node), **own})
            for node in range(count)
        ]
        for pod in pods:
            pod.wait()
        output = Path(base, action.name, str(attempt + 1))
        if Path(output, "outputs.pb").exists() and not Path(output, "error.pb").exists():
            break
    return output


def _replicas(template: Any) -> int:
    """How many pods the job of a task has."""
    if template.type != "pytorch":
        return 1
    return int(template.custom["workerReplicas"]["replicas"])


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def errors_pb2() -> Any:
    """The module of a task's error, which Flyte 2.0 has by itself."""
    from importlib import import_module

    try:
        return import_module("flyteidl2.core.errors_pb2")
    except ModuleNotFoundError:
        return import_module("flyteidl2.core.execution_pb2")


def create_controller(**_: Any) -> Any:
    """Replaces the SDK's function, whose controller needs a backend's services."""
    is_first = version("flyte").startswith("2.0.")  # a task of these versions has a controller in any case
    if os.environ.get("POD_CHILDREN") != "processes" and not is_first:
        return None
    from flyte2_controller import ProcessController

    return ProcessController(run_child)


def main() -> None:
    import flyte._internal.controllers
    from flyte._bin import runtime

    flyte._internal.controllers.create_controller = create_controller  # `a0` looks the function up when it runs
    runtime._pass_through()


if __name__ == "__main__":
    main()
