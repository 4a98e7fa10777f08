"""`flyteplugins-tracking run`: run a script that knows nothing of this library inside of `tracking_run`.

A `wandb.init(...)` in the script, or in a framework that it uses, joins the run. Under torchrun:
`torchrun --nproc-per-node=8 -m flyteplugins_tracking run --project llm train.py --lr 1e-3`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from types import TracebackType

from flyteplugins_tracking._util.modules import is_own
from flyteplugins_tracking.decorator import tracking_run
from flyteplugins_tracking.errors import TrackingError
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig

# How the text of an option becomes a value, by the first word of the field's type. Other fields have no option.
_OPTIONS = {"str": str, "float": float, "RunMode": str, "RankScope": str, "IfUnavailable": str, "PrimaryRank": int}
_EXAMPLE = "example: torchrun --nproc-per-node=8 -m flyteplugins_tracking run --project llm train.py --lr 1e-3"


def main(arguments: list[str]) -> int:
    """Run the script, and return the exit status of the process if the script does not end it."""
    parser = argparse.ArgumentParser(
        "flyteplugins-tracking run", description="Run a script inside of a run.", epilog=_EXAMPLE, allow_abbrev=False
    )
    for name in sorted(OWN_ARGUMENTS):
        kind = str(TrackingConfig.__annotations__[name]).split(" |")[0]
        if name == "tracker" or kind in _OPTIONS:
            parser.add_argument(f"--{name.replace('_', '-')}", type=_OPTIONS.get(kind, str), default=argparse.SUPPRESS)
        elif kind == "bool":
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", default=argparse.SUPPRESS)
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="the arguments of the script")
    given = vars(parser.parse_args(arguments))
    script, words, is_module = (given.pop(name) for name in ("script", "words", "is_module"))
    if not is_module and not os.path.exists(script):
        parser.error(f"there is no {script}")  # before a run is opened
    sys.argv = [script, *words]
    # `python -m` has put the working directory there.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    try:
        with tracking_run(**given):
            _run(script, is_module)
    except TrackingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except Exception as error:
        # As Python prints it without this command: from the script's own line on.
        sys.excepthook(type(error), error, _of_script(error.__traceback__))
        return 1
    return 0


def _run(script: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script), run_name="__main__")


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package and of runpy that it begins with: none of a SyntaxError."""
    while frames is not None and (is_own(file := frames.tb_frame.f_code.co_filename) or "runpy" in file):
        frames = frames.tb_next
    return frames
