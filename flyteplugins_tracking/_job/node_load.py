"""The load of the job's nodes: CPU, memory, network and disks by psutil, and GPUs by NVIDIA's NVML.

Local rank 0 of each node measures it with each of its pulses. What a machine does not have is left out. In a container,
CPU, memory and disks are the host's.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import fmean
from typing import Any

from flyteplugins_tracking._util import threads
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

# The most nodes that the run shows one by one, and how many of them it shows in a larger job.
_MOST_NODES, _WORST = 8, 3
_MOST_GPUS = 16
# How long NVML may take to open the GPUs or to look at them, and to be let go, in seconds.
_LOOK_S, _CLOSE_S = 8.0, 0.5
# What is in percent: only such distances from the mean can be compared with each other.
_PERCENTAGES = ("cpu", "memory", "gpu/util", "gpu/memory")


def open_meter() -> LoadMeter | None:
    """Return the meter of this node; None, with a warning, without psutil."""
    try:
        return LoadMeter(importlib.import_module("psutil"))
    except ImportError:
        logger.warning(
            "the run does not show the load of this node: psutil is not installed: "
            "pip install 'flyteplugins-tracking[pulse]'"
        )
        return None


class LoadMeter:
    """Measures the load of this node."""

    def __init__(self, psutil: Any) -> None:
        """Measures nothing yet."""
        self._psutil = psutil
        self._measured_at: float | None = None
        self._bytes: dict[str, int] = {}  # those of the last call
        self._nvml: Any = None
        self._has_gpus = True  # until a look at them shows none, fails or does not end
        self._warn_once = WarnOnce(logger)

    def measure(self) -> dict[str, float]:
        """Return the load: percent, MB (10**6 bytes) a second, watts and degrees Celsius.

        Its keys are "cpu", "memory", "net/sent_mb_s", "disk/read_mb_s", "gpu/0/util" and the like. CPU, network and
        disks are those since the last call. The first call returns nothing. Raises nothing.
        """
        now = time.monotonic()
        is_first, seconds = self._measured_at is None, now - (self._measured_at or 0.0)
        self._measured_at = now
        measures: dict[str, Callable[[], Mapping[str, float]]] = {
            "cpu": lambda: {"cpu": self._psutil.cpu_percent()},
            "memory": lambda: {"memory": self._psutil.virtual_memory().percent},
            "network": lambda: self._rates(seconds, self._network()),
            "disks": lambda: self._rates(seconds, self._disks()),
            "gpus": self._look_at_gpus,
        }
        values: dict[str, float] = {}
        for title, measure in measures.items():
            try:
                values |= measure()
            except Exception as error:
                self._warn(title, error)
        return {} if is_first else {key: round(value, 2) for key, value in values.items()}

    def close(self) -> None:
        """Let NVML go, unless a call of it is still to return."""
        if self._nvml is not None and self._has_gpus:
            with suppress(Exception):
                threads.call_within(_CLOSE_S, self._nvml.nvmlShutdown)
        self._has_gpus = False

    def _warn(self, title: str, error: Exception) -> None:
        kind, text = type(error).__name__, first_line(error)
        self._warn_once(title, "the run does not show the %s of this node: %s: %s", title, kind, text)

    def _rates(self, seconds: float, counters: Mapping[str, int]) -> dict[str, float]:
        """Return the growth since the last call in MB a second; without that of a counter which has gone back."""
        before, self._bytes = self._bytes, {**self._bytes, **counters}
        grown = {key: size - before.get(key, size) for key, size in counters.items()}
        return {key: size / seconds / 1e6 for key, size in grown.items() if size >= 0}

    def _network(self) -> dict[str, int]:
        devices = [device for name, device in self._psutil.net_io_counters(pernic=True).items() if name != "lo"]
        sent, received = (sum(getattr(device, name) for device in devices) for name in ("bytes_sent", "bytes_recv"))
        return {"net/sent_mb_s": sent, "net/recv_mb_s": received}

    def _disks(self) -> dict[str, int]:
        disks = self._psutil.disk_io_counters()  # None without a disk
        return {} if disks is None else {"disk/read_mb_s": disks.read_bytes, "disk/write_mb_s": disks.write_bytes}

    def _look_at_gpus(self) -> dict[str, float]:
        """Return the load of the GPUs.

        NVML may never return, as with a GPU that has fallen off the bus. The other duties of this thread wait for it
        once, and no longer than `_LOOK_S`.
        """
        if not self._has_gpus:
            return {}
        self._has_gpus = False
        values = threads.call_within(_LOOK_S, self._gpus)
        self._has_gpus = self._nvml is not None
        return values

    def _gpus(self) -> dict[str, float]:
        self._nvml = nvml = self._nvml or _open_nvml()
        readers: dict[str, Callable[[Any], Any]] = {
            "util": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory": lambda gpu: 100 * (info := nvml.nvmlDeviceGetMemoryInfo(gpu)).used / info.total,
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temp_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }
        values: dict[str, float] = {}
        for number in range(0 if nvml is None else min(nvml.nvmlDeviceGetCount(), _MOST_GPUS)):
            for name, read in readers.items():
                try:
                    values[f"gpu/{number}/{name}"] = float(read(nvml.nvmlDeviceGetHandleByIndex(number)))
                except Exception as error:  # a GPU need not have each value, and may fall off the bus
                    self._warn(f"gpus' {name}", error)
        return values


def _open_nvml() -> Any:
    """Return NVML; None on a machine without its package or NVIDIA's driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return None
    return nvml


# What the run shows


def metrics(loads: Mapping[int, Mapping[str, float]], num_nodes: int) -> dict[str, float]:
    """Return what the run shows of the nodes.

    Up to 8 nodes, that is each node's load. In a larger job it is the minimum, maximum and mean of all nodes, and the
    loads of the three nodes that are the farthest from the mean, with the means of their GPUs. So the row has less than
    4 kB for any number of nodes.

    Args:
        loads: The load of each node that has one, by its index.
        num_nodes: How many nodes the job has.
    """
    if num_nodes <= _MOST_NODES:
        return {f"nodes/{node}/{key}": value for node, load in sorted(loads.items()) for key, value in load.items()}
    by_node = {node: _by_kind(load) for node, load in loads.items()}
    by_kind: dict[str, list[float]] = {}
    for kinds in by_node.values():
        for kind, values in kinds.items():
            by_kind.setdefault(kind, []).extend(values)
    means = {kind: fmean(values) for kind, values in by_kind.items()}

    def distance(node: int) -> float:
        """Return the largest distance of one of the node's values from the mean, in percentage points."""
        kinds = by_node[node]
        return max((abs(v - means[kind]) for kind in _PERCENTAGES for v in kinds.get(kind, ())), default=0.0)

    row: dict[str, float] = {}
    for kind, values in by_kind.items():
        row |= {f"nodes/{kind}/min": min(values), f"nodes/{kind}/max": max(values)}
        row[f"nodes/{kind}/mean"] = round(means[kind], 2)
    for place, node in enumerate(sorted(by_node, key=lambda node: (-distance(node), node))[:_WORST], 1):
        row[f"nodes/worst/{place}/node"] = node
        row |= {f"nodes/worst/{place}/{kind}": round(fmean(values), 2) for kind, values in by_node[node].items()}
    return row


def _by_kind(load: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the values of a load without the GPUs' numbers."""
    kinds: dict[str, list[float]] = {}
    for key, value in load.items():
        kinds.setdefault(re.sub(r"^gpu/\d+/", "gpu/", key), []).append(value)
    return kinds
