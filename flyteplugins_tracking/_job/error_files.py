"""torchelastic's error files: how a rank reports its exception to its agent, which prints it when the job ends.

torch writes them for functions under `torch.distributed.elastic.multiprocessing.errors.record`. They are read too: a
rank of this node may fail outside of a decorated function.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flyteplugins_tracking._job.failures import Failure, clean_message, clean_traceback, sounds_secondary
from flyteplugins_tracking._rank.info import DistributedInfo

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write(failure: Failure, env: Mapping[str, str]) -> None:
    """Write the failure as `record` does, unless the file is there.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/multiprocessing/errors/error_handler.py
    """
    path = env.get(_VARIABLE)
    if not path:
        return
    details = {"py_callstack": failure.traceback, "timestamp": str(int(time.time()))}
    message = {"message": {"message": f"{failure.type}: {failure.message}", "extraInfo": details}}
    with suppress(OSError), open(path, "x") as file:
        json.dump(message, file)


def remove(env: Mapping[str, str]) -> None:
    """Remove this rank's file: the function's caller has handled the exception."""
    with suppress(OSError, KeyError):
        os.remove(env[_VARIABLE])


def read(info: DistributedInfo, env: Mapping[str, str]) -> list[Failure]:
    """Return the failures of this node's ranks in this attempt, in their order.

    The agent makes `{directory}/attempt_{n}/{local_rank}/error.json`.
    """
    own = Path(env.get(_VARIABLE, ""))
    if own.name != "error.json" or info.local_rank is None:
        return []
    failures = []
    for path in own.parent.parent.glob("*/error.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            failures.append(_read(path, info.rank - info.local_rank + int(path.parent.name)))
    return sorted(failures, key=lambda failure: failure.failed_at)


def _read(path: Path, rank: int) -> Failure:
    message = json.loads(path.read_text())["message"]
    kind, _, text = message["message"].partition(": ")
    stack = message["extraInfo"]["py_callstack"]
    return Failure(
        rank=rank,
        type=kind,
        message=clean_message(text),
        exit_code=1,
        traceback=clean_traceback(stack),
        is_secondary=sounds_secondary([kind.rpartition(".")[2]], text, stack),
        failed_at=path.stat().st_mtime,
    )
