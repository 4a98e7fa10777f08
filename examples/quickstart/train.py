# torchrun --nproc-per-node=2 train.py    # with Slurm: srun python train.py
from flyteplugins_tracking import get_run, tracking_init


@tracking_init(project="llm", config={"lr": 3e-4})
def train(steps: int) -> None:
    run = get_run()  # W&B's own run on rank 0, None on the other ranks
    for step in range(steps):
        if run is not None:
            run.log({"loss": 1 / (step + 1)})
    print("no run" if run is None else f"{steps} rows in {run.project}")


if __name__ == "__main__":
    train(steps=10)
