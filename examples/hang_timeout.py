"""Where the ranks are, if the job makes no progress for 10 minutes.

torchrun --nproc-per-node=4 examples/hang_timeout.py
"""

from flyteplugins_tracking import get_run, heartbeat, tracking_init


@tracking_init(project="examples", hang_timeout_s=600)
def train(epochs: int) -> None:
    """Evaluate after each epoch. Ranks without a run may call heartbeat too."""
    run = get_run()
    for epoch in range(epochs):
        if run is not None:
            run.log({"epoch": epoch})
        evaluate()


def evaluate() -> None:
    """Logs nothing, and continues."""
    for _batch in range(100):
        heartbeat()  # 50 ns


if __name__ == "__main__":
    train(epochs=3)
