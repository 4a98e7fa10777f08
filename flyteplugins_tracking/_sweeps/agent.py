"""`sweep_agent`, which runs the trials of a sweep on every rank of a distributed job."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.call import detached, exit_code_of
from flyteplugins_tracking._runs.request import may_prompt
from flyteplugins_tracking._sweeps.sweep import log_in, restored_session
from flyteplugins_tracking._util.modules import initialised_distributed
from flyteplugins_tracking._util.proc import TERMINATED, set_variables
from flyteplugins_tracking.errors import ConfigError

logger = logging.getLogger(__name__)

# The variables of a trial that the other ranks need for their runs: the base of the ids, the project and the entity.
_TRIAL_VARIABLES = ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_ENTITY")
# The parameters that rank 0 sent for the current trial; None on rank 0 and outside a trial.
_received_parameters: dict[str, Any] | None = None


def sweep_agent(objective: Callable[[], Any], *, count: int | None = None, sweep_id: str | None = None) -> None:
    """Run trials of a sweep on every rank. Like `wandb.agent`, even in a distributed job.

    Only rank 0 has the agent, which calls the objective in a thread. The other ranks call it for the same trials, in
    step, and return when the agent has ended. A trial fails if the objective raises on any rank. If a rank raises while
    others wait for it in a collective, those wait until the process group's timeout: pass a short one to
    `init_process_group`.

    Args:
        objective: Called without arguments. In it `get_sweep_parameters()` returns the trial's parameters on each rank.
            If it is decorated with `tracking_init`, it has the trial's run.
        count: How many trials to run; None for all trials of the sweep.
        sweep_id: The sweep's id or `entity/project/id`; None for the sweep of the enclosing `tracking_sweep`. Only the
            argument of rank 0 is used.

    Raises:
        ConfigError: There is no sweep, several ranks have no process group, or the objective is async.
        TrackerUnavailableError: The service has no API key.
        TrackerNotInstalledError: wandb is missing.
    """
    if flyte_context.is_async(objective):
        raise ConfigError("the objective of sweep_agent must be a plain function: write `def`, not `async def`")
    info = get_distributed_info()
    if info is None or info.world_size == 1:
        _run_agent(objective, count, sweep_id)
        return
    ranks = _Ranks()
    try:
        if ranks.is_leader:
            _lead(ranks, objective, count, sweep_id)
        else:
            _follow(ranks, objective)
    finally:
        ranks.close()


def get_sweep_parameters() -> dict[str, Any]:
    """Return the parameters of the trial that runs in this process, on every rank of `sweep_agent`.

    The dict is empty outside a trial.
    """
    if _received_parameters is not None:
        return dict(_received_parameters)
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not path:
        return {}
    yaml: Any = importlib.import_module("yaml")  # which W&B's client needs
    with open(path) as file:
        parameters = yaml.safe_load(file) or {}
    return {name: value["value"] for name, value in parameters.items() if name != "wandb_version"}


def _run_agent(function: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    sweep = flyte_context.propagated(propagation.SWEEP_ID)
    if sweep_id is not None and sweep_id != sweep.get("id"):
        sweep = {"id": sweep_id}
    if not sweep.get("id"):
        raise ConfigError("sweep_agent has no sweep: pass sweep_id=..., or call it in a tracking_sweep function")
    with restored_session():
        log_in(None, may_prompt(get_distributed_info(), flyte_context.current_context()))
        import wandb

        wandb.agent(
            sweep["id"], function=function, entity=sweep.get("entity"), project=sweep.get("project"), count=count
        )


def _lead(ranks: _Ranks, objective: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    cuda = sys.modules["torch"].cuda
    device = cuda.current_device() if cuda.is_initialized() else None

    def trial() -> None:
        if device is not None:  # the agent's thread starts with device 0
            cuda.set_device(device)
        variables = {name: os.environ[name] for name in _TRIAL_VARIABLES if name in os.environ}
        ranks.send((variables, get_sweep_parameters()))
        try:
            objective()
        except BaseException as error:
            ranks.gather_errors(error)
            raise
        failures = [f"rank {rank}: {failure}" for rank, failure in enumerate(ranks.gather_errors(None)) if failure]
        if failures:
            _fail_run()
            raise RuntimeError("the objective failed on " + "; ".join(failures))

    try:
        _run_agent(trial, count, sweep_id)
    finally:
        ranks.send(None)


def _follow(ranks: _Ranks, objective: Callable[[], Any]) -> None:
    """Call the objective with the parameters and variables of each trial of rank 0, until its agent has ended."""
    global _received_parameters
    while True:
        trial = ranks.receive()
        if trial is None:
            return
        variables, _received_parameters = trial
        put_back, error = set_variables(variables), None
        try:
            with detached():
                objective()
        except (Exception, SystemExit) as raised:
            if isinstance(raised, SystemExit) and exit_code_of(raised) == TERMINATED:
                raise
            error = raised
            logger.error("the objective failed in trial %s", variables["WANDB_RUN_ID"], exc_info=True)
        finally:
            _received_parameters = None
            put_back()
        ranks.gather_errors(error)


def _fail_run() -> None:
    """Finish the trial's run as failed. The objective may have finished it with rank 0's status."""
    import wandb

    run = wandb.run
    if run is not None and run.id == os.environ["WANDB_RUN_ID"] and not run._is_finished:
        return  # the agent finishes it
    wandb.init(resume="allow", reinit="create_new").finish(exit_code=1)


class _Ranks:
    """The other ranks, in a separate process group, so that its collectives do not mix with the objective's.

    Raises:
        ConfigError: torch's default process group is not initialised.
    """

    def __init__(self) -> None:
        distributed = initialised_distributed()
        if distributed is None:
            raise ConfigError(
                "sweep_agent with several ranks needs a process group: call torch.distributed.init_process_group first"
            )
        from datetime import timedelta

        self._distributed = distributed
        # gloo even beside NCCL: the agent's thread must not use a CUDA device. A sweep may have no trial for hours.
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        self.is_leader = distributed.get_rank() == 0

    def send(self, message: Any) -> None:
        """Send `message` to the other ranks, which get it from `receive`."""
        self._distributed.broadcast_object_list([message], src=0, group=self._group)

    def receive(self) -> Any:
        """Return the next message of rank 0."""
        messages = [None]
        self._distributed.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]

    def gather_errors(self, error: BaseException | None) -> list[str | None]:
        """Return the trial's error on each rank, or None for success, when the trial has ended on all ranks."""
        errors: list[str | None] = [None] * self._distributed.get_world_size()
        error_text = None if error is None else f"{type(error).__name__}: {error}"
        self._distributed.all_gather_object(errors, error_text, group=self._group)
        return errors

    def close(self) -> None:
        """Destroy the group."""
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)
