"""The command line: `flyteplugins-tracking`, which is `python -m flyteplugins_tracking` too."""

from __future__ import annotations

import os
import sys
from importlib import import_module

_HELP = """\
usage: flyteplugins-tracking [COMMAND] [OPTIONS]

commands, each with --help:
  doctor   check a job before it starts; without a command too
           torchrun --nproc-per-node=2 -m flyteplugins_tracking doctor --tracker wandb
  run      run a script, unchanged, whose wandb.init opens the run
           torchrun --nproc-per-node=2 -m flyteplugins_tracking run --project llm train.py
  send     send what local directories have and their services have not
           flyteplugins-tracking send wandb
           flyteplugins-tracking send --watch /shared/llm: live, from a login node

  --version
"""


def main() -> int:
    """Run the command that the arguments name, and return its exit status."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("doctor", [])
    if name in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0
    if name == "--version":
        from flyteplugins_tracking._util.modules import installed_version

        sys.stdout.write(f"flyteplugins-tracking {installed_version('flyteplugins-tracking') or '(not installed)'}\n")
        return 0
    if name.startswith("-"):  # options of the doctor
        name, arguments = "doctor", sys.argv[1:]
    if name not in ("doctor", "run", "send"):
        sys.stderr.write(f"flyteplugins-tracking: there is no command {name!r}\n\n{_HELP}")
        return 2
    if name == "send":
        # `python -m` looks there first: W&B's own directory "wandb" may hold a module that somebody has planted.
        sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    status: int = import_module(f"flyteplugins_tracking._commands.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
