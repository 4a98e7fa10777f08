"""The life of a run, from the call of a decorated function to the end of its run.

In the room, each file after those that it imports: what is known before a call (`context`), the arguments that reach
other functions and processes as text (`propagation`), the status of a function (`exit_codes`), SIGTERM (`sigterm`), the
calls of this process (`calls`), the file of `run_file=` (`run_file`), which run it is (`identity`), a run that is open,
until its end (`run`), the stop at one step (`stopping`), how a run is opened (`opening`), and one call (`call`).
May enter: code that is the same for every tracker and every platform. Must not: names of a tracker or of Flyte. They
come in as objects: a `Tracker` and the execution context of the call.
It may import `errors`, `_util`, `_rank`, `_job` and `trackers`. A rank without a run loads `call`, `calls`,
`context`, `exit_codes` and `propagation` only.
"""
