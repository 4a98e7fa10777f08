"""A tracked task of Flyte 2: two ranks on a cluster, one on this machine.

pip install "flyteplugins-tracking[wandb,flyte,torch]"
wandb login    # or, without an account: export WANDB_MODE=offline
python flyte2.py    # on a cluster: flyte run flyte2.py train --steps 10
"""

import flyte
from flyteplugins.pytorch import Elastic

from flyteplugins_tracking import get_run, tracking_init

env = flyte.TaskEnvironment(
    name="quickstart",
    plugin_config=Elastic(nnodes=1, nproc_per_node=2),
)


@tracking_init(project="llm", config={"lr": 3e-4})
@env.task
def train(steps: int) -> float:
    run = get_run()  # W&B's run on rank 0, None on the other ranks
    loss = 1.0
    for step in range(steps):
        loss = 1 / (step + 1)
        if run is not None:
            run.log({"loss": loss})
    return loss


if __name__ == "__main__":
    print(
        "last loss:",
        flyte.with_runcontext(mode="local").run(train, steps=10).outputs()[0],
    )
