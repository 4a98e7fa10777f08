"""The life of a run around one call of a decorated function: opened, watched, closed.

What may enter: what every tracker and every launcher has in common. What must not: a vendor's name, and Flyte.
"""
