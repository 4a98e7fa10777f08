# RL_RUN=grpo-42 srun --ntasks=10 python roles_in_srun.py
import os

import flyteplugins_tracking as tracking

TASKS = int(os.environ.get("SLURM_NTASKS", "1"))
ROLES = [*(f"rollout-{n}" for n in range(TASKS - 2)), "eval"]


def main(task: int) -> None:
    part = {"roles": ROLES} if task == 0 else {"role": ROLES[task - 1]}

    @tracking.tracking_init(project="examples", id=os.environ["RL_RUN"], **part)
    def work() -> None:
        run = tracking.get_run()
        if run is not None:
            run.log({"task": task})

    with tracking.override_distributed_info(None):  # not a rank of srun's job
        work()


if __name__ == "__main__":
    main(int(os.environ["SLURM_PROCID"]))
