"""`python -m flyteplugins_tracking` checks a job before it starts; `send` sends directories; `run` runs a script."""

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
    if sys.argv[1:2] == ["run"]:
        from flyteplugins_tracking._commands import run

        return run.main(sys.argv[2:])
    from flyteplugins_tracking._commands import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
