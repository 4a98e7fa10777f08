"""The exit codes that a shell reports for a process that a signal has ended."""

from __future__ import annotations

# 128 and the number of the signal, which every POSIX system has: 15 for SIGTERM, 2 for SIGINT (Ctrl-C).
TERMINATED = 143
INTERRUPTED = 130
