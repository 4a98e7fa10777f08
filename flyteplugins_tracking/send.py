"""`python -m flyteplugins_tracking.send DIRECTORY...`, which warnings name: see `_commands.send`."""

from __future__ import annotations

import sys

from flyteplugins_tracking._commands.send import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
