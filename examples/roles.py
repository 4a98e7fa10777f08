# python roles.py trainer & python roles.py rollout-0 & python roles.py eval
import sys

import flyteplugins_tracking as tracking

RUN_ID = "grpo-42"


@tracking.tracking_init(project="examples", id=RUN_ID, roles=["rollout-0", "eval"], config={"lr": 1e-5})
def train(steps: int) -> None:
    run = tracking.get_run()
    for step in range(steps):
        if run is not None:  # with torchrun, on rank 0
            run.log({"loss": 1 / (step + 1)}, step=step)


@tracking.tracking_init(project="examples", id=RUN_ID, role="rollout-0", config={"temperature": 0.7})
def roll_out(batches: int) -> None:
    for batch in range(batches):
        tracking.get_run().log({"reward": batch * 0.1})  # arrives as rollout-0/reward


@tracking.tracking_init(project="examples", id=RUN_ID, role="eval")
def evaluate() -> None:
    tracking.get_run().log({"accuracy": 0.5}, step=100)


if __name__ == "__main__":
    {"trainer": lambda: train(20), "rollout-0": lambda: roll_out(10), "eval": evaluate}[sys.argv[1]]()
