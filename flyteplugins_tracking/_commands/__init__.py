"""The commands of `python -m flyteplugins_tracking`.

In the room: the doctor (`doctor`), `send`, which sends what local files have and their services have not, and `watch`,
which does so while jobs write them; `run`, which runs a script that opens its run itself.
May enter: what is shown or done on a command line. Must not: what a decorated function needs.
It may import every room but `compat` and `testing`.
"""
