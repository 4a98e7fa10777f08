"""SIGTERM: ends the open runs in time, and lets the signal have its usual effect.

torchrun, Kubernetes and Slurm send SIGTERM, and SIGKILL `kill_after_s` later: 30 s. The service must know the run's
end before that, wherever the main thread is: a Python signal handler does not run while it is in a C call such as a
collective. So a thread, the reader, reads the wakeup fd, to which the interpreter writes each signal immediately. At
the first SIGTERM it starts another thread, the ender. A run ends once: with the function, or else by the ender.
`finish_timeout_s` below is `kill_after_s` less 5 s.

Nobody has a handler for SIGTERM (or only torchelastic's agent, which its workers inherit):

    main thread   user's code | SystemExit(143): `finally` blocks, with the run open | the call closes it: 143 | exit
    SIGTERM ------> handler --+
    the ender       the handler has not run after 1 s: the main thread is in a C call. Ends the runs and the process
                    the function has not ended after finish_timeout_s: ends the runs and the process

Somebody has a handler, which may do anything:

    main thread   user's code           | user's handler | user's code, with the run open | the call closes it: 143
    SIGTERM ------> our handler waits --+
    the ender       has the services told: 1 s at most. SIGTERM again
                    the function has not ended after finish_timeout_s: ends the runs. What is logged then is kept

The decorated functions are in other threads, and the main thread runs an asyncio loop: Flyte 2 runs a plain task in its
pod this way. It has no function to unwind: if nobody has a handler, the ender ends the runs first, and the process.

In a critical section (`_util.signals`) and in the vendor's code, the signal waits. It is sent again each 5 ms. While a
run is opened or closed, the program's other handlers wait too (`_util.handlers`): the reader has them called after 5 s.
Other exceptions, as of a DataLoader's handler for SIGCHLD, do not change how the process ends: `stop` raises
SystemExit(143).

May enter: the handling of signals. Must not: a vendor, a rank, another module's name. A listener ends runs through
functions that it is given; a tracker sees its `request.sigterm` and nothing else of this package.
"""

from flyteplugins_tracking._runs.sigterm.base import ForkMask as ForkMask
from flyteplugins_tracking._runs.sigterm.base import SigtermListener as SigtermListener
from flyteplugins_tracking._runs.sigterm.base import is_installed as is_installed
from flyteplugins_tracking._runs.sigterm.loop import LoopListener as LoopListener
from flyteplugins_tracking._runs.sigterm.main_thread import MainThreadListener as MainThreadListener
