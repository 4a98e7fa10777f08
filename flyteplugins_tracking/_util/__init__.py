"""Small tools that know nothing of runs, ranks and trackers.

In the room: processes and forks (`proc`, `fork`), threads and calls with a timeout (`threads`), functions that a signal
must not leave halfway, handlers of the program that are put off, and the file that receives signals (`signals`), a lock
between the processes of a machine (`lock`), files of this user (`files`), checks of arguments (`checks`), a config as
plain values (`plain`), frozen values (`record`), strings that are shown (`text`) without the keys that this process
knows (`secrets`), warnings that are logged once (`warn_once`), and modules that are imported already (`modules`).
May enter: a tool that two rooms need and that another project could use as it is. Must not: names of this package's
concepts.
It may import `errors` only.
"""
