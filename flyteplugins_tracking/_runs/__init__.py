"""The life of a run, from the call of a decorated function to the end of its run.

In the room: the calls that are running (`calls`), one call from start to end (`lifecycle`), what a platform knows and
can do for it (`context`), a run that is open or has ended (`run`), how it is opened (`open`) and closed (`close`),
SIGTERM (`sigterm`), the stop at one step (`stopping`), the steps of a run's attempts (`goodput`), the arguments that
reach other functions and processes as text (`propagation`), and the thread that looks at the job's ranks (`monitor`):
for the roll-call, the pulse and the stop.
May enter: code that is the same for every tracker and every platform. Must not: names of a tracker or of Flyte. They
come in as objects: a `Tracker` and the execution context of the call.
It may import `errors`, `_util`, `_rank`, `_job` and `trackers`. A rank without a run loads `calls`, `lifecycle`,
`context` and `propagation` only.
"""
