"""A run for every rank, in one group: each has its own learning rate.

torchrun --nproc-per-node=4 examples/run_per_rank.py

Without a W&B account: `export WANDB_MODE=offline` first. The runs are
`{base}-rank-0` to `{base}-rank-3`. Their group is `{base}`.
"""

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

LEARNING_RATES = (0.03, 0.1, 0.3, 1.0)


@tracking_init(project="examples", run_mode="new")
def train(steps: int) -> float:
    """Find the minimum of (w - 3)^2. Return how far w is from it."""
    run, info = (
        get_run(),
        get_distributed_info(),
    )  # in "new" every rank has a run
    lr = LEARNING_RATES[(info.rank if info else 0) % len(LEARNING_RATES)]
    run.config.update({"lr": lr})
    w = 0.0
    for _ in range(steps):
        w -= lr * 2 * (w - 3)
        run.log({"loss": (w - 3) ** 2})
    return abs(w - 3)


if __name__ == "__main__":
    train(steps=20)
