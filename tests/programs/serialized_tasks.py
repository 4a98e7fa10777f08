"""Print all that a serialized Flyte 1 task consists of, for tasks with a tracker and workers or a secret."""

import cloudpickle
import flyte_tasks
import flyte_workers

for task in (flyte_workers.spawn_below, flyte_tasks.with_secret, flyte_workers.spawn_above):
    print(flyte_tasks.serialized(task), cloudpickle.dumps(task), repr(task.task_function))
