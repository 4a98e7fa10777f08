"""Small tools that know nothing of runs, ranks and trackers.

In the room: facts about processes (`proc`), a lock between the processes of a machine (`lock`), checks of arguments
(`checks`), an error for pickles of an older version (`moved`), calls with a deadline (`timeout`), warnings that are
logged once (`warn_once`) and what happens at a fork (`fork`).
May enter: a tool that two rooms need and that another project could use as it is. Must not: names of this package's
concepts.
It may import `errors` only.
"""
