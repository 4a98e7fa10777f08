"""A tracked function in a process that has imported flytekit and is no task."""

import flytekit  # noqa: F401 its context has a random prefix in each process

from flyteplugins_tracking import get_run, tracking_init


@tracking_init
def train() -> None:
    print(get_run().id)


train()
