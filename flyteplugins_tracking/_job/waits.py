"""Where a thread waits for other ranks, or for what it has asked of its GPU: told from its stack, without hooks."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Collection
from types import CodeType, FrameType

# Code that waits for other ranks. In `backward`, DDP and FSDP reduce gradients.
COLLECTIVES = re.compile(r"[/\\](?:torch[/\\](?:distributed|autograd)|horovod|mpi4py|deepspeed[/\\]comm)[/\\]")
_SYNCHRONIZATIONS = re.compile(r"[/\\]torch[/\\]cuda[/\\](?:__init__|streams)\.py$")
# Which only passes a call on.
_DISPATCHER = re.compile(r"[/\\]torch[/\\]_ops\.py$")
# Methods in C that wait for a collective or the GPU, when they are called without arguments. They have no frame.
_METHODS = {"item", "tolist", "cpu", "synchronize", "wait"}
# What stands between the name of a method and its call.
_FILLERS = {"CACHE", "PRECALL", "PUSH_NULL"}


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame is `frame` waits in a collective, in `backward` or for its GPU."""
    if _DISPATCHER.search(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return bool(COLLECTIVES.search(file) or _SYNCHRONIZATIONS.search(file)) or frame.f_lasti in _waits(frame.f_code)


@functools.lru_cache(maxsize=512)
def _waits(code: CodeType) -> Collection[int]:
    """Return the offsets of the calls in `code` that wait: those of `_METHODS` without arguments."""
    offsets, method = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("CALL") and method in _METHODS:
            offsets.add(instruction.offset)
        if instruction.opname not in _FILLERS:
            is_method = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")
            method = str(instruction.argval) if is_method else ""
    return offsets
