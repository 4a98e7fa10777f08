"""`sweep_agent`: runs the trials of a sweep, on every rank of a distributed job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flyteplugins_tracking._config import propagation
from flyteplugins_tracking._flyte import context as flyte_context
from flyteplugins_tracking._job.topology import get_distributed_info
from flyteplugins_tracking._runs.calls import detached
from flyteplugins_tracking._runs.lifecycle import exit_code_of
from flyteplugins_tracking._runs.open import may_prompt
from flyteplugins_tracking._sweeps.sweep import log_in, session_kept
from flyteplugins_tracking._util.exit_codes import TERMINATED
from flyteplugins_tracking.errors import ConfigError

logger = logging.getLogger(__name__)

# What the other ranks have of the trial's, beside its parameters: the base of their runs' ids, and where these go.
_TRIAL = ("WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_ENTITY")
# The parameters of the trial that this rank runs with rank 0.
_followed: dict[str, Any] | None = None


def sweep_agent(objective: Callable[[], Any], *, count: int | None = None, sweep_id: str | None = None) -> None:
    """Run trials of a sweep on every rank: `wandb.agent`, for distributed jobs too.

    Rank 0 alone has the agent, which calls the objective in a thread. The other ranks call it for the same trials, in
    step, and return when the agent has ended. A trial in which it raises on another rank has failed. A rank that raises
    while others wait for it in a collective leaves these waiting until the process group's timeout: pass a short one to
    `init_process_group`.

    Args:
        objective: Called without arguments; `get_sweep_parameters()` is the trial's on each rank. Decorated with
            `tracking_init`, it has the trial's run.
        count: How many trials to run; None for as many as the sweep has.
        sweep_id: The sweep's id or `entity/project/id`; None for that of the `tracking_sweep` context. Rank 0's counts.

    Raises:
        ConfigError: There is no sweep, several ranks have no process group, or the objective is async.
        TrackerUnavailableError: There is no key for the service.
        TrackerNotInstalledError: wandb is missing.
    """
    if flyte_context.is_async(objective):
        raise ConfigError("the agent calls its objective in a thread, and awaits nothing: write `def`, not `async def`")
    info = get_distributed_info()
    if info is None or info.world_size == 1:
        _run_agent(objective, count, sweep_id)
        return
    ranks = _Ranks()
    try:
        if ranks.leads:
            _lead(ranks, objective, count, sweep_id)
        else:
            _follow(ranks, objective)
    finally:
        ranks.close()


def get_sweep_parameters() -> dict[str, Any]:
    """The parameters of the trial that runs in this process: on every rank in `sweep_agent`. Empty outside of one."""
    if _followed is not None:
        return dict(_followed)
    path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if not path:
        return {}
    from wandb.sdk.lib.config_util import dict_from_config_file

    return dict(dict_from_config_file(path) or {})


def _run_agent(function: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    sweep = flyte_context.propagated(propagation.SWEEP_ID)
    if sweep_id is not None and sweep_id != sweep.get("id"):
        sweep = {"id": sweep_id}
    if not sweep.get("id"):
        raise ConfigError("there is no sweep here: pass sweep_id=, or call sweep_agent in a tracking_sweep function")
    with session_kept():
        log_in(None, may_prompt(get_distributed_info(), flyte_context.current_context()))
        import wandb

        wandb.agent(
            sweep["id"], function=function, entity=sweep.get("entity"), project=sweep.get("project"), count=count
        )


def _lead(ranks: _Ranks, objective: Callable[[], Any], count: int | None, sweep_id: str | None) -> None:
    device = _cuda_device()

    def trial() -> None:
        _use_cuda_device(device)
        variables = {name: os.environ[name] for name in _TRIAL if name in os.environ}
        ranks.tell((variables, get_sweep_parameters()))
        try:
            objective()
        except BaseException as error:
            ranks.outcomes(error)
            raise
        failures = [f"rank {rank}: {failure}" for rank, failure in enumerate(ranks.outcomes(None)) if failure]
        if failures:
            _fail_run()
            raise RuntimeError("the objective has failed on " + "; ".join(failures))

    try:
        _run_agent(trial, count, sweep_id)
    finally:
        ranks.tell(None)


def _follow(ranks: _Ranks, objective: Callable[[], Any]) -> None:
    while True:
        told = ranks.told()
        if told is None:
            return
        error = None
        try:
            with _following(*told), detached():
                objective()
        except (Exception, SystemExit) as raised:
            if isinstance(raised, SystemExit) and exit_code_of(raised) == TERMINATED:
                raise
            error = raised
            logger.error("the objective has failed in trial %s", told[0]["WANDB_RUN_ID"], exc_info=True)
        ranks.outcomes(error)


@contextmanager
def _following(variables: Mapping[str, str], parameters: dict[str, Any]) -> Iterator[None]:
    """Have the trial's parameters and variables here."""
    global _followed
    before = {name: os.environ.get(name) for name in variables}
    _followed = parameters
    os.environ.update(variables)
    try:
        yield
    finally:
        _followed = None
        propagation.set_variables(before)


def _fail_run() -> None:
    """End the trial's run as failed, where the objective has ended it already as rank 0 has."""
    import wandb

    run = wandb.run
    if run is not None and run.id == os.environ["WANDB_RUN_ID"] and not run._is_finished:
        return  # the agent ends it
    wandb.init(resume="allow", reinit="create_new").finish(exit_code=1)


class _Ranks:
    """The other ranks, by a process group of its own: the objective's collectives are not mixed with these.

    Raises:
        ConfigError: There is no process group to make it from.
    """

    def __init__(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "sweep_agent with several ranks needs a process group: call torch.distributed.init_process_group first"
            )
        from datetime import timedelta

        self._distributed: Any = distributed
        # Of gloo also beside NCCL: no CUDA device is used from the agent's thread. A sweep may have no trial for hours.
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        self.leads = distributed.get_rank() == 0

    def tell(self, message: Any) -> None:
        """Have the other ranks return `message` from `told`."""
        self._distributed.broadcast_object_list([message], src=0, group=self._group)

    def told(self) -> Any:
        """What rank 0 tells."""
        messages = [None]
        self._distributed.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]

    def outcomes(self, error: BaseException | None) -> list[str | None]:
        """How the trial has ended on each rank: None where nothing was raised. Returns when it has ended on all."""
        outcomes: list[str | None] = [None] * self._distributed.get_world_size()
        own = None if error is None else f"{type(error).__name__}: {error}"
        self._distributed.all_gather_object(outcomes, own, group=self._group)
        return outcomes

    def close(self) -> None:
        """Give the group back."""
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group(self._group)


def _cuda_device() -> int | None:
    torch = sys.modules["torch"]
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _use_cuda_device(device: int | None) -> None:
    """Each thread has a current device of its own, at first the first one."""
    if device is not None:
        sys.modules["torch"].cuda.set_device(device)
