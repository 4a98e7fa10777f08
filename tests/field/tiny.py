"""The model and the data of all scripts, and what happens to them: FIELD_FAULT is "raise", "kill", "slow" or empty.

A script does not know of it: its model fails in a forward pass, as models do. "raise" and "kill" come in the pass of
number FIELD_AT, counted from 0, on rank 1 of the first attempt, when rank 0 has logged its rows of the passes before. A
"slow" model leaves time for a signal. Each process counts its passes, in bytes of the file `passes-{rank}-{attempt}`.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

_FAULT, _AT = os.environ.get("FIELD_FAULT", ""), int(os.environ.get("FIELD_AT", "0"))
_RANK, _ATTEMPT = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
_DIRECTORY = Path(os.environ.get("TRAIN_DIR", "."))
# A gloo group that goes with its last model may hang for ever: its destructor, which has the GIL, waits for a thread
# that wants it (pytorch issue 56297). So the group stays until Python ends, a moment after the last collective.
_KEPT: list[object] = []
atexit.register(time.sleep, 0.1)


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            _pass()
        return super().forward(x)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, size: int = 64) -> None:
        self.x = torch.linspace(0, 1, size * 8).reshape(size, 8)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


def _count(rank: str) -> int:
    """How many passes a rank of this attempt has begun."""
    path = _DIRECTORY / f"passes-{rank}-{_ATTEMPT}"
    return path.stat().st_size if path.exists() else 0


def _pass() -> None:
    if dist.is_initialized() and not _KEPT:
        _KEPT.append(dist.group.WORLD)
    number = _count(_RANK)
    with (_DIRECTORY / f"passes-{_RANK}-{_ATTEMPT}").open("ab") as file:
        file.write(b".")
    if _FAULT == "slow":
        time.sleep(0.01)
    elif _FAULT and (_RANK, _ATTEMPT, number) == ("1", "0", _AT):
        while _count("0") <= _AT:
            time.sleep(0.005)
        if _FAULT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("the loss is not a number")
