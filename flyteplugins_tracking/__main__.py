"""`python -m flyteplugins_tracking`: the doctor; `ranks`: the jobs of this machine."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that the arguments name, and return its exit status."""
    if sys.argv[1:2] == ["ranks"]:
        from flyteplugins_tracking._commands import ranks

        return ranks.main(sys.argv[2:])
    from flyteplugins_tracking._commands import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
