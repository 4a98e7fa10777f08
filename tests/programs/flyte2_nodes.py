"""A Flyte 2 task of two nodes, without a tracker, and its parent."""

import flyte
from flyte2_elastic import Elastic
from flyte2_tasks import env, seen

two_nodes = flyte.TaskEnvironment(
    name="two-nodes",
    plugin_config=Elastic(nnodes=2, nproc_per_node=2, max_restarts=0, rdzv_configs={"timeout": 60, "join_timeout": 60}),
)


@two_nodes.task
def nodes(n: int) -> None:
    seen("nodes")


@env.task
def parent_of_nodes(n: int) -> None:
    nodes(n)
