"""`python -m flyteplugins_tracking`: the doctor."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the doctor, and return its exit status."""
    from flyteplugins_tracking._commands import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
