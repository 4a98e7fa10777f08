# python flyte1.py, or on a cluster: pyflyte run --remote flyte1.py pipeline
from flytekit import task, workflow
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import get_run, tracking_init

WORKERS = Elastic(nnodes=1, nproc_per_node=2, increase_shared_mem=False)


@task(task_config=WORKERS)
@tracking_init(project="llm", config={"lr": 3e-4})
def train(steps: int) -> float:
    run = get_run()  # W&B's run on rank 0, None on the other ranks
    loss = 1.0
    for step in range(steps):
        loss = 1 / (step + 1)
        if run is not None:
            run.log({"loss": loss})
    return loss


@workflow
def pipeline(steps: int = 10) -> float:
    return train(steps=steps)


if __name__ == "__main__":
    print("last loss:", pipeline())
