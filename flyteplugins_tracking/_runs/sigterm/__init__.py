"""SIGTERM: finishes the open runs in time, and then lets the signal have its usual effect.

torchrun, Kubernetes and Slurm send SIGTERM, and SIGKILL 30 s later. The service must know the run's end before that,
wherever the main thread is: a Python signal handler does not run while it is in a C call such as a collective. So a
thread reads the wakeup fd, to which the interpreter writes each signal at once.

    main.py    SigtermWatcher: the decorated function runs in the main thread
    loop.py    AsyncioSigtermWatcher: it runs in another thread, and the main thread runs an asyncio loop
    wakeup.py  WakeupFd: the pipe that both read

Nobody has a handler for SIGTERM (or only torchelastic's agent, which its workers inherit), in `main`:

    main thread   user's code | SystemExit(143): `finally` blocks, with the run open | close: finish(143) | exit
    SIGTERM ------> handler --+
                    in a critical section (`_util.critical`) or the vendor's code: sent again each 5 ms until that ends
    our thread      waits 1 s for the handler, then 6 s for the function's end. If either does not come, as in a C call:
                    finish_on_signal(143), and the process exits with 143

Somebody has a handler, which may do anything:

    main thread   user's code goes on                | user's handler | user's code: logging opens the run again
    SIGTERM ------> our handler waits ---------------+
    our thread      finish_on_signal(143), at most 5 s, and SIGTERM again | at the timeout: finish_on_signal(143) again

Three verbs end a run. `finish` is the vendor's: the handle ends the run at the service. `close` is ours: the decorated
function has ended, so the run is finished if nobody else uses it, and its lock is released. `finish_on_signal` is a
`finish` that comes while the function may go on.

May enter: the handling of signals. Must not: a vendor, a rank, the name of a module of ours. The watchers
finish runs through a function that they are given; a tracker sees its `request.watch` and nothing else of this room.
"""
