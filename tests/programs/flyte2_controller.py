"""The remote controller of the Flyte 2 SDK, with processes and files in place of the backend's services.

It submits what the real one submits: inputs with the context, task templates with rendered links, traces that a later
attempt finds again. Only what is behind it is replaced. It works for tasks of the pod's process, as the real one does:
a worker of an Elastic task has none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flyte._context import ctx
from flyte._internal.controllers import _ControllerState
from flyte._internal.controllers.remote import RemoteController
from flyte._internal.controllers.remote._action import Action
from flyte2_pod import errors_pb2
from flyteidl2.common import phase_pb2
from flyteidl2.core.execution_pb2 import ExecutionError


class ProcessController(RemoteController):
    """`run_child` runs the pods of an action and returns the directory of its outputs."""

    def __init__(self, run_child: Callable[[Action], Path]) -> None:
        super().__init__(_no_services())
        self._run_child = run_child
        _ControllerState.controller = self

    async def submit_and_wait_for_action(self, action: Action) -> Action:
        if action.type != "task":
            return action  # a trace has written its outputs already
        output = await asyncio.to_thread(self._run_child, action)
        return _ended(action, output, str(output))

    submit_action = submit_and_wait_for_action  # its name in Flyte 2.0

    async def get_action(self, action_id: Any, parent_action_name: str) -> Action | None:
        """A trace that an earlier attempt has recorded."""
        output = Path(ctx().run_base_dir, action_id.name)
        outputs, error = output / "outputs.pb", output / "error.pb"
        if not outputs.exists() and not error.exists():
            return None
        action = Action(action_id=action_id, parent_action_name=parent_action_name, type="trace")
        return _ended(action, output, str(outputs))

    async def cancel_action(self, action: Action) -> None:
        action.mark_cancelled()

    async def finalize_parent_action(self, action_id: Any) -> None:
        pass


async def _no_services() -> Any:
    return SimpleNamespace(state_service=None, queue_service=None, actions_service=None)


def _ended(action: Action, output: Path, outputs_uri: str) -> Action:
    """`action` as the backend reports it at its end: an error counts before outputs do."""
    if Path(output, "error.pb").exists() or not Path(output, "outputs.pb").exists():
        action.phase, action.err = phase_pb2.ACTION_PHASE_FAILED, _error(output / "error.pb")
    else:
        action.phase, action.realized_outputs_uri = phase_pb2.ACTION_PHASE_SUCCEEDED, outputs_uri
    return action


def _error(path: Path) -> ExecutionError:
    """The error that a pod left in `error.pb`; a pod that left none was killed."""
    if not path.exists():
        message = "the pod ended without outputs and without an error"
        return ExecutionError(code="Unknown", message=message, kind=ExecutionError.SYSTEM)
    found = errors_pb2().ErrorDocument.FromString(path.read_bytes()).error
    return ExecutionError(code=found.code, message=found.message, kind=found.origin, recoverability=found.kind)
