"""The options of `flyteplugins-tracking run`: the arguments of `tracking_init`, from a command line."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from typing import Any, get_args

from flyteplugins_tracking._rank.plan import RANK_SCOPES, RUN_MODES
from flyteplugins_tracking.decorator import tracking_init, tracking_run
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, IfUnavailable, TrackingConfig

_EXAMPLE = "example: torchrun --nproc-per-node=8 -m flyteplugins_tracking run --project llm train.py --lr 1e-3"


class _ScriptRun(tracking_run):
    _opens_later = True


def parsed(arguments: list[str]) -> tuple[tracking_run, bool, list[str]]:
    """Return the block for the script, whether the script is a module, and its name with its own arguments.

    Exits with a message if an option is wrong.
    """
    parser = _parser()
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"there is no option {unknown[0]}; what only the tracker knows is an --option NAME=VALUE")
    given = vars(namespace)
    is_module, words = given.pop("is_module"), given.pop("words")
    if words[:1] == ["--"]:
        del words[0]
    if words[1:2] == ["--"] and "TORCHELASTIC_RUN_ID" in os.environ:
        del words[1]  # as torchrun does behind the name of its script
    if not words:
        parser.error("the following arguments are required: SCRIPT")
    if words[0] == "-":
        parser.error("a script of the standard input is /dev/stdin, and not -")
    for name in given.keys() & {"config", "option"}:
        given[name] = dict(given[name])
    given = {**given.pop("option", {}), **given}
    if given.get("run_file"):  # the script may go to another directory
        given["run_file"] = os.path.abspath(os.path.expanduser(given["run_file"]))
    try:
        return _ScriptRun(**given), is_module, words
    except ConfigError as error:
        parser.error(str(error))


def _pair(text: str) -> tuple[str, Any]:
    """Return the name and the value of an option's NAME=VALUE. The value is read as JSON if it is JSON."""
    name, is_pair, value = text.partition("=")
    if not (name and is_pair):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


_PAIRS: dict[str, Any] = {"type": _pair, "action": "append", "metavar": "NAME=VALUE"}
# How an option becomes an argument of `tracking_run`, by the name or else by the type of the argument's field.
# None: it has no option.
_OPTIONS: dict[str, dict[str, Any] | None] = {
    "tracker": {},
    "config": {**_PAIRS, "help": "A value of the run's config. May be repeated."},
    "tags": {"action": "append", "metavar": "TAG"},
    "secret": None,  # everybody sees the command line of a process
    "download_logs": None,  # of a Flyte task
    "RunMode": {"choices": RUN_MODES},
    "RankScope": {"choices": RANK_SCOPES},
    "IfUnavailable": {"choices": get_args(IfUnavailable)},
    "PrimaryRank": {"type": int, "metavar": "RANK"},
    "bool": {"action": "store_true"},
    "str": {},
    "float": {"type": float, "metavar": "SECONDS"},
    "Sequence[str]": {"action": "append", "metavar": "ROLE"},
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "flyteplugins-tracking run",
        usage="%(prog)s [OPTIONS] [-m] SCRIPT [ARGUMENTS OF THE SCRIPT]",
        description="Run a script, which opens its run itself. The options are the arguments of tracking_init.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # Of each argument, the first sentence of its text.
    texts = dict(
        re.findall(r"^ {4}(\w+): (.+?\.)(?=\s|$)", inspect.getdoc(tracking_init) or "", re.DOTALL | re.MULTILINE)
    )
    for name in sorted(OWN_ARGUMENTS):
        kind = TrackingConfig.__annotations__[name].removesuffix(" | None")
        option = _OPTIONS[name if name in _OPTIONS else kind]
        if option is not None:
            text = texts.get(name, "") + (" May be repeated." if option.get("action") == "append" else "")
            parser.add_argument(f"--{name.replace('_', '-')}", **{"help": text, **option})
    parser.add_argument("--option", **_PAIRS, help="An argument of the tracker, as entity=team. May be repeated.")
    parser.add_argument("-m", dest="is_module", action="store_true", default=False, help="SCRIPT is a module")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT...]", help="the script and its arguments"
    )
    return parser
