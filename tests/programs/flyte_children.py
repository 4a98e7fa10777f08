"""A Flyte 1 task that runs one trial after another in processes of its own. It is not tracked itself."""

from flytekit import task
from trials import start


@task
def forks(n: int) -> int:
    for number in range(3):
        start("fork", number)
    return n


@task
def spawns(n: int) -> int:
    for number in range(3):
        start("spawn", number)
    return n
