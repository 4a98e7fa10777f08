"""The platform that calls the function: Flyte 1, Flyte 2 or none.

In the room: what the platform knows about the call (`context`), one module for each Flyte (`flyte1` is flytekit),
and `tracking_config`, which passes arguments to tasks.
May enter: code that names Flyte. Must not: names of a tracker.
Flyte's packages are imported inside functions, and only if the user has imported them.
It may import every room below it: `_runs`, `trackers`, `_job`, `_rank`, `_util` and `errors`.
"""
