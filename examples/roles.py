# python roles.py trainer & python roles.py rollout-0 & python roles.py eval
import sys

from flyteplugins_tracking import get_run, tracking_init

JOB = {"project": "examples", "id": "grpo-42"}
ROLES = ["rollout-0", "eval"]


@tracking_init(**JOB, roles=ROLES, config={"lr": 1e-5})
def train(steps: int) -> None:
    run = get_run()  # None on all ranks but 0, also in the roles
    for step in range(steps):
        if run is not None:
            run.log({"loss": 1 / (step + 1)}, step=step)


@tracking_init(**JOB, role="rollout-0", config={"temperature": 0.7})
def roll_out(batches: int) -> None:
    run = get_run()
    for batch in range(batches):
        if run is not None:
            run.log({"reward": batch * 0.1})  # as rollout-0/reward


@tracking_init(**JOB, role="eval")
def evaluate() -> None:
    run = get_run()
    if run is not None:
        run.log({"accuracy": 0.5}, step=100)


if __name__ == "__main__":
    jobs = {"trainer": (train, 20), "rollout-0": (roll_out, 10)}
    function, *numbers = jobs.get(sys.argv[1], (evaluate,))
    function(*numbers)
