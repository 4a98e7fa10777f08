"""One run that every rank logs to, each under its own keys; and a plot.

torchrun --nproc-per-node=4 examples/shared_metrics.py
python examples/shared_metrics.py plot    # writes ranks.png

Without a W&B account: `export WANDB_MODE=offline` first. The plot reads W&B's
local files, which W&B writes online too.
"""

import random
import sys
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init


@tracking_init(project="examples", run_mode="shared", rank_prefix=True)
def train(steps: int) -> None:
    """Log `rank_0/loss`, `rank_1/loss`, ... over `global_step`."""
    run, info = get_run(), get_distributed_info()  # on every rank, the same run
    rank = info.rank if info else 0
    shuffled = random.Random(rank)  # noqa: S311, of the example's data
    for step in range(steps):
        loss = (1 + 0.2 * rank) / (step + 1) + 0.02 * shuffled.random()
        run.log({"loss": loss}, step=step)


def plot(directory: Path, picture: Path) -> None:
    """Draw each rank's loss in the newest run below `directory`."""
    import matplotlib as mpl
    from wandb_files import read_runs

    mpl.use("agg")
    import matplotlib.pyplot as plt

    stored = read_runs(directory)[-1]
    logged = {key for row in stored.rows for key in row}
    keys = sorted(key for key in logged if key.endswith("/loss"))
    figure, axes = plt.subplots(layout="constrained")
    for key in keys:
        rows = [row for row in stored.rows if key in row]
        points = sorted((row["global_step"], row[key]) for row in rows)
        axes.plot(*zip(*points, strict=True), label=key)
    axes.set(title=f"Run {stored.id}", xlabel="global_step", ylabel="loss")
    axes.legend()
    figure.savefig(picture)
    print(f"{picture}: {', '.join(keys)} of run {stored.id}")


if __name__ == "__main__":
    if sys.argv[1:] == ["plot"]:
        plot(Path("wandb"), Path("ranks.png"))
    else:
        train(steps=20)
