"""Who this process is in its job, and what follows from that.

In the room: which launcher started the process and as which rank (`topology`), which ranks open a run (`plan`), the id
that all ranks agree on (`identity`), what they tell each other (`board`, `failures`, `pulse`, `agreement`), the steps
of a run's attempts (`goodput`), and metrics over all ranks (`metrics`, `process_group`).
May enter: what depends on the launcher alone. Must not: arguments of the decorator, trackers, Flyte.
It may import `errors` and `_util` only.
"""
