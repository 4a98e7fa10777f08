"""Prints the config of the serialized templates of flytekit tasks, by the tasks' names."""

import json

import flyte_tasks
import flyte_workers

TASKS = ("below", "above", "inner_links", "async_below", "cached", "pytorch_job")
WORKERS = ("spawn_below", "spawn_above", "links_per_worker", "link_to_group", "links_of_a_range")

tasks = [*(getattr(flyte_tasks, name) for name in TASKS), *(getattr(flyte_workers, name) for name in WORKERS)]
print("TEMPLATES", json.dumps({task.name.rpartition(".")[2]: flyte_tasks.serialized(task) for task in tasks}))
