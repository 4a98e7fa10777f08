"""Small helpers that know nothing of tracking: no run, no rank, no vendor.

A helper may enter if two rooms need it and it needs none of them. It imports the standard library only.
"""
