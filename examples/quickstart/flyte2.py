# python flyte2.py, or on a cluster: flyte run flyte2.py train --steps 10
import flyte
from flyteplugins.pytorch import Elastic

from flyteplugins_tracking import get_run, tracking_init

WORKERS = Elastic(nnodes=1, nproc_per_node=2)
env = flyte.TaskEnvironment(name="quickstart", plugin_config=WORKERS)


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
    run = flyte.with_runcontext(mode="local").run(train, steps=10)
    print("last loss:", run.outputs()[0])
