"""A training with two trackers, whose runs stay on this machine."""

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(tracker="mlflow", project="p", id="local")
@tracking_init(tracker="trackio", project="p", id="local")
def train() -> None:
    for tracker in ("mlflow", "trackio"):
        get_run(tracker).log({"loss": 0.5})


if __name__ == "__main__":
    train()
