"""Warm jobs: a Python process is forked from one that has imported torch and the vendors, instead of started anew.

Most of a job's time goes into imports: torch takes 2 s of CPU in each process. One server for the whole session has
imported all that a job could need, and forks each job that is asked for. In a job, Python processes that it starts
itself (torchrun's workers, `subprocess`, `multiprocessing`'s spawn) are forked too: see `program`.

A forked process looks like one that was executed: `sys.modules` has nothing that the program has not imported itself
(see `imports`), `/proc` shows its own command line and environment (see `program`), and its open files, signal handlers
and exit are those of a new process. `TESTS_COLD=1` starts real interpreters instead; so does `cold=True` of
`support.jobs.start`, for what is measured or for a client that a fork does not suit.
"""
