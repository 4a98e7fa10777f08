"""The life of a run, from the call of a decorated function to the end of its run.

In the room: one call (`call`), the platform's side of it (`context`), what the tracker is asked for (`request`), a run
that is open, and what is left to do when it has ended (`run`), SIGTERM (`sigterm`), the stop at one step (`stopping`),
and the arguments that reach other functions and processes as text (`propagation`).
May enter: code that is the same for every tracker and every platform. Must not: names of a tracker or of Flyte. They
come in as objects: a `Tracker` and the execution context of the call.
It may import `errors`, `_util`, `_rank`, `_job` and `trackers`. A rank without a run loads `call`, `context` and
`propagation` only.
"""
