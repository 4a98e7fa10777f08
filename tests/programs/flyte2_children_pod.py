"""A Flyte 2 task that runs one trial after another in processes that it forks. It is not tracked itself."""

import flyte
from trials import start

env = flyte.TaskEnvironment(name="children")


@env.task
def forks(n: int) -> int:
    for number in range(3):
        start("fork", number)
    return n
