"""Where a thread waits for other ranks or its GPU: told from the file of its innermost Python frame, without hooks."""

from __future__ import annotations

import re
from types import FrameType

# Code that waits for other ranks. In `backward`, DDP and FSDP reduce gradients.
COLLECTIVES = re.compile(r"[/\\](?:torch[/\\](?:distributed|autograd)|horovod|mpi4py|deepspeed[/\\]comm)[/\\]")
_SYNCHRONIZATIONS = re.compile(r"[/\\]torch[/\\]cuda[/\\](?:__init__|streams)\.py$")
# Which only passes a call on.
_DISPATCHER = re.compile(r"[/\\]torch[/\\]_ops\.py$")


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame is `frame` waits in a collective, in `backward` or for its GPU."""
    if _DISPATCHER.search(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return bool(COLLECTIVES.search(file) or _SYNCHRONIZATIONS.search(file))
