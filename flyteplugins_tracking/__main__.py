"""`python -m flyteplugins_tracking`: the doctor."""

from __future__ import annotations

import sys

from flyteplugins_tracking.doctor import main

if __name__ == "__main__":
    sys.exit(main())
