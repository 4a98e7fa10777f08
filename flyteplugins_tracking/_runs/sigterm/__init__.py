"""SIGTERM: finishes the open runs in time, and then lets the signal have its usual effect.

torchrun, Kubernetes and Slurm send SIGTERM, and SIGKILL `kill_after_s` later: 30 s. The service must know the run's
end before that, wherever the main thread is: a Python signal handler does not run while it is in a C call such as a
collective. So a thread reads the wakeup fd, to which the interpreter writes each signal at once. `finish_timeout_s`
below is `kill_after_s` less 5 s.

    main.py    SigtermWatcher: the decorated function runs in the main thread
    loop.py    AsyncioSigtermWatcher: it runs in another thread, and the main thread runs an asyncio loop
    wakeup.py  WakeupFd: the pipe that both read

Nobody has a handler for SIGTERM (or only torchelastic's agent, which its workers inherit), in `main`:

    main thread   user's code | SystemExit(143): `finally` blocks, with the run open | close: finish(143) | exit
    SIGTERM ------> handler --+
                    in a critical section (`_util.critical`) or the vendor's code: sent again each 5 ms until that ends
    our thread      what follows

If the handler runs within 1 s, the main thread runs Python:

    1. Our thread waits for the function's end: 6 s, or longer while the run is closed, at most finish_timeout_s + 1 s.
    2. If the end does not come: finish_on_signal(143), at most finish_timeout_s + 1 s.
    3. The process is ended with 143, if it still runs 10 s after the function's end; or finish_timeout_s after the
       handler, if the function has not ended. A run that is open again then has 2 s more.

If it does not, the main thread is in a C call:

    1. Our thread waits for the handler: 1 s.
    2. finish_on_signal(143): at most finish_timeout_s + 1 s.
    3. Our thread waits for the handler once more: 1 s.
    4. If it has not run: the process is ended with 143, at most finish_timeout_s + 3 s after the signal.

Somebody has a handler, which may do anything:

    main thread   user's code continues              | user's handler | user's code: logging opens the run again
    SIGTERM ------> our handler waits ---------------+
    our thread      finish_on_signal and SIGTERM again ...............| finish_on_signal again

    1. finish_on_signal(143): at most 5 s, or finish_timeout_s if that is less.
    2. SIGTERM again, each 5 ms until the user's handler has run or the function has ended.
    3. Then, if the function has not ended finish_timeout_s after the first signal: finish_on_signal(143) again.

Three verbs end a run. `finish` is the vendor's: the handle ends the run at the service. `close` is ours: the decorated
function has ended, so the run is finished if nobody else uses it, and its lock is released. `finish_on_signal` is a
`finish` that comes while the function may still run.

May enter: the handling of signals. Must not: a vendor, a rank, the name of a module of ours. The watchers
finish runs through a function that they are given; a tracker sees its `request.watch` and nothing else of this room.
"""
