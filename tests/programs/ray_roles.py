"""Actors of Ray, each with a role in the run of the process that starts them."""

from __future__ import annotations

import ray

from flyteplugins_tracking import get_run, tracking_init

ACTORS = 2


@ray.remote
class Rollout:
    def __init__(self, number: int) -> None:
        self.number = number

    def roll_out(self, rows: int) -> str:
        @tracking_init(project="tests", id="of-actors", role=f"rollout-{self.number}", config={"number": self.number})
        def work() -> str:
            run = get_run()
            for row in range(rows):
                run.log({"reward": row})
            return str(run.id)

        return work()


@tracking_init(project="tests", id="of-actors", roles=[f"rollout-{number}" for number in range(ACTORS)])
def train() -> None:
    ray.init(num_cpus=ACTORS, include_dashboard=False)
    ids = ray.get([Rollout.remote(number).roll_out.remote(10) for number in range(ACTORS)])
    assert ids == ["of-actors"] * ACTORS
    get_run().log({"loss": 1})
    ray.shutdown()


if __name__ == "__main__":
    train()
