"""The user's configuration.

In the room: the arguments of `tracking_init`, checked and merged (`config`), and how they reach other processes as text
(`propagation`).
May enter: arguments that every tracker has, and their checks. Must not: a tracker's own arguments, open runs, Flyte.
It may import `errors`, `_util`, `_rank` and `_job` only.
"""
