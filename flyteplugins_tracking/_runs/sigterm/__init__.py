"""SIGTERM: the open runs are ended in time, and then the signal does what it would have done."""
