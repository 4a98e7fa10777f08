"""A `pynvml` for jobs on machines without a GPU: each node has two, of which the first is as busy as its node says.

Each process that initialises it leaves the file `nvml-RANK` in the job's directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0


class NVMLError_LibraryNotFound(Exception):  # noqa: N801, N818 NVML's own name
    """There is no driver."""


def nvmlInit() -> None:  # noqa: N802
    Path(os.environ["TRAIN_DIR"], f"nvml-{os.environ['RANK']}").touch()


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetUtilizationRates(index: int) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(gpu=0 if index else 50 + int(os.environ["GROUP_RANK"]), memory=0)


def nvmlDeviceGetMemoryInfo(_: int) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(used=20, total=80)


def nvmlDeviceGetPowerUsage(_: int) -> int:  # noqa: N802
    return 300_000


def nvmlDeviceGetTemperature(_: int, __: int) -> int:  # noqa: N802
    return 60
