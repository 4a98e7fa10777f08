"""`python -m flyteplugins_tracking` checks a job before it starts. With `send` it sends local directories."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command that the arguments name, and return its exit status."""
    if sys.argv[1:2] == ["send"]:
        # `python -m` looks there first: W&B's own directory "wandb" may hold a module that somebody has planted.
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
        from flyteplugins_tracking._commands import send

        return send.main(sys.argv[2:])
    from flyteplugins_tracking._commands import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
