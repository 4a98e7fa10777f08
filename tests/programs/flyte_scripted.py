"""The training of `scripted_training.py` as a Flyte 1 task."""

import scripted_training as training
from flytekit import task

from flyteplugins_tracking import tracking_init


@tracking_init(**{"project": training.PROJECT, **training.SETTINGS.get("tracking", {})})
@task
def plain(n: int) -> str:
    training.body()
    return ""
