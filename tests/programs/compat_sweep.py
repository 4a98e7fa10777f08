"""A Flyte 2 task with a sweep, as it is written for flyteplugins-wandb; only the module of the import is another."""

import flyte
import wandb
from wandb.agents.pyagent import Agent

from flyteplugins_tracking.compat.wandb import (
    download_wandb_sweep_dirs,
    get_wandb_context,
    get_wandb_run,
    get_wandb_sweep_context,
    get_wandb_sweep_id,
    wandb_config,
    wandb_init,
    wandb_sweep,
    wandb_sweep_config,
)

Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
env = flyte.TaskEnvironment(name="sweeps")


@wandb_init
def objective() -> None:
    run = get_wandb_run()
    run.log({"loss": run.config["lr"]})


@wandb_sweep
@env.task
def run_sweep() -> str:
    sweep_id = get_wandb_sweep_id()
    assert get_wandb_sweep_context().method == "grid"
    wandb.agent(sweep_id, function=objective, count=2, project=get_wandb_context().project, entity="e")
    download_wandb_sweep_dirs(base_path="trials")
    return sweep_id


flyte.init()
context = {
    **wandb_config(project="p", entity="e"),
    **wandb_sweep_config(
        method="grid", metric={"name": "loss", "goal": "minimize"}, parameters={"lr": {"values": [1, 2]}}
    ),
}
flyte.with_runcontext(mode="local", custom_context=context).run(run_sweep)
