"""The training of `ends.py` as a Flyte 1 task."""

import ends
from flytekit import task

from flyteplugins_tracking import tracking_init


@tracking_init(**{"project": ends.PROJECT, **ends.SETTINGS.get("tracking", {})})
@task
def plain(n: int) -> str:
    ends.body()
    return ""
