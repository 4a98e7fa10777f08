"""How the ranks that write to one run find each other, and how they end.

In the room: which rank leads on its node (`role`), the connection of a node's leader and followers (`node`), and how
the rank that ends the run waits for the others (`writers`, `attendance`).
May enter: what the ranks of one run say to each other. Must not: what one vendor's client needs for it.
"""
