"""A Flyte 2 task with two trackings, which another task calls with changed options. Runs locally."""

import flyte

from flyteplugins_tracking import get_run, tracking_init

env = flyte.TaskEnvironment(name="stacked")


@tracking_init(project="outer", run_mode="new")
@tracking_init(project="inner", run_mode="new")
@env.task
def stacked(n: int) -> int:
    get_run().log({"n": n})
    return n


@env.task
def calls(n: int) -> int:
    return stacked.override(retries=2)(n)


flyte.init()
flyte.run(calls, n=1)
