"""What the ranks of a job tell each other.

In the room: the board that they share, and the stores that it can be in (`board`), the id that they agree on
(`identity`), their failures (`failures`, `siblings`), their progress (`progress`), where they hang (`hang`), how fast
they are (`pulse`), how busy their nodes are (`node_load`), the step at which they stop (`agreement`), the thread that
looks at all that (`watch`), keys that name the rank (`metrics`), and torch's process group (`process_group`).
May enter: what depends on the job alone. Must not: arguments of the decorator, trackers, Flyte.
It may import `errors`, `_util` and `_rank`.
"""
