# python roles.py trainer & python roles.py rollout-0 & python roles.py eval
import sys

from flyteplugins_tracking import get_run, tracking_init

RUN = "grpo-42"
ROLES = ["rollout-0", "eval"]
WARM = {"temperature": 0.7}


@tracking_init(project="examples", id=RUN, roles=ROLES, config={"lr": 1e-5})
def train(steps: int) -> None:
    run = get_run()  # None on all ranks but 0, also in the roles
    for step in range(steps):
        if run is not None:
            run.log({"loss": 1 / (step + 1)}, step=step)


@tracking_init(project="examples", id=RUN, role="rollout-0", config=WARM)
def roll_out(batches: int) -> None:
    run = get_run()
    for batch in range(batches):
        if run is not None:
            run.log({"reward": batch * 0.1})  # as rollout-0/reward


@tracking_init(project="examples", id=RUN, role="eval")
def evaluate() -> None:
    run = get_run()
    if run is not None:
        run.log({"accuracy": 0.5}, step=100)


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        train(20)
    elif sys.argv[1] == "rollout-0":
        roll_out(10)
    else:
        evaluate()
