"""Small tools that know nothing of runs, ranks and trackers.

In the room: values about processes (`proc`), a lock between the processes of a machine (`lock`), checks of arguments
(`checks`), functions that a signal must not leave halfway (`critical`), exit codes of signals (`exit_codes`), calls
with a timeout (`timeout`), waiting for threads (`threads`), warnings that are logged once (`warn_once`), functions that
run at a fork (`fork`), addresses that may hold credentials (`url`), files that two directories have (`whole_file`),
files that only this user can reach (`private_dir`), and modules that are imported already (`loaded`).
May enter: a tool that two rooms need and that another project could use as it is. Must not: names of this package's
concepts.
It may import `errors` only.
"""
