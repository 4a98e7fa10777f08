"""Who this process is in its job, and what follows from that alone.

In the room: a rank's place as users get it (`info`), which launcher started the process and as which rank (`launchers`,
`topology`; `engines` where no variable tells), what else it may be: a rank's child process (`children`) or a pool's
worker (`pools`), and which ranks open a run (`plan`).
May enter: what one process can find out by itself. Must not: what needs another rank, arguments of the decorator,
trackers, Flyte.
It may import `errors` and `_util` only.
"""
