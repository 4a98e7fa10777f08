"""The load of the job's nodes: CPU, memory, network, disks and GPUs.

Local rank 0 of each node measures it with each of its pulses, from Linux's /proc and NVIDIA's NVML. What a machine does
not have is left out. In a container, CPU and disks are the host's.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from statistics import fmean
from typing import Any

from flyteplugins_tracking._util import proc, threads
from flyteplugins_tracking._util.text import first_line
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)

# The most nodes that the run shows one by one, and how many of them it shows in a larger job.
_MOST_NODES, _WORST = 8, 3
_MOST_GPUS = 16
# How long a look at the GPUs is waited for, in seconds, and after how long it counts as one that hangs.
_LOOK_S, _HANGS_S = 0.5, 5.0
# The keys of a load.
_KEY = re.compile(
    r"cpu|memory|net/(?:sent|recv)_mb_s|disk/(?:read|write)_mb_s|gpu/(?:\d|1[0-5])/(?:util|memory|power_w|temp_c)"
)
# What is in percent: only such distances from the mean can be compared with each other.
_PERCENTAGES = ("cpu", "memory", "gpu/util", "gpu/memory")
# Of /proc/diskstats, whatever the disk's own sectors have: https://docs.kernel.org/block/stat.html
_SECTOR_BYTES = 512
# Of cgroups, by their controller, which version 2 does not name: the limit, the memory that is used, and the part of it
# that the kernel takes back when it needs memory.
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class LoadMeter:
    """Measures the load of this node."""

    def __init__(self, root: str = "") -> None:
        """Nothing is measured yet. `root` goes before /proc and /sys."""
        self._root = root
        self._measured_at = 0.0
        self._counters: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
        self._nvml: Any = None
        self._devices: list[tuple[int, Any]] | None = None  # None before NVML was looked for
        self._look: tuple[Future[dict[str, float]], float] | None = None  # at the GPUs, and when it has begun
        self._warn_once = WarnOnce(logger)

    def measure(self) -> dict[str, float]:
        """Return the load: percent, MB (10**6 bytes) a second, watts and degrees Celsius, by the keys of `_KEY`.

        CPU, network and disks are those since the last call, and left out by the first one. Raises nothing.
        """
        now = time.monotonic()
        seconds, self._measured_at = now - self._measured_at, now
        values: dict[str, float] = {}
        for measure in (self._cpu, self._memory, self._network, self._disks, self._looked_gpus):
            try:
                values |= measure(seconds)
            except Exception as error:
                self._warn(measure.__name__.split("_")[-1], error)
        return {key: round(value, 2) for key, value in values.items() if math.isfinite(value)}

    def close(self) -> None:
        """Let NVML go, unless a call of it is still to return."""
        if self._nvml is not None and self._look is None:
            with suppress(Exception):
                threads.call_within(_LOOK_S, self._nvml.nvmlShutdown)
        self._nvml, self._devices = None, []

    def _looked_gpus(self, _: float) -> dict[str, float]:
        """Return the load of the GPUs, of this call or the one before.

        NVML may take seconds, or never return, as with a GPU that has fallen off the bus. So each look at it has a
        thread of its own, and there is one at a time: the other duties of this thread do not wait for it.
        """
        if self._look is None:
            if self._devices == []:
                return {}
            self._look = Future[dict[str, float]](), time.monotonic()
            threads.run_with_timeout(_LOOK_S, self._look_at_gpus, self._look[0], name="flyteplugins_tracking.nvml")
        found, began_at = self._look
        if found.done():
            self._look = None
            return found.result()
        if time.monotonic() - began_at > _HANGS_S:
            raise TimeoutError("NVML does not answer, and is asked no more until it does")
        return {}

    def _look_at_gpus(self, found: Future[dict[str, float]]) -> None:
        try:
            found.set_result(self._gpus())
        except Exception as error:
            found.set_exception(error)

    def _warn(self, title: str, error: Exception) -> None:
        kind, text = type(error).__name__, first_line(error)
        self._warn_once(title, "the run does not show the %s of this node: %s: %s", title, kind, text)

    def _rates(self, names: tuple[str, str], counters: dict[str, tuple[int, int]], seconds: float) -> dict[str, float]:
        """Return the growth of both counters of all devices since the last call, in millions a second.

        Empty if it is unknown: a counter has gone back, as one of 32 bits does, or the devices are not the same.
        """
        before, self._counters[names] = self._counters.get(names, {}), counters
        if before.keys() != counters.keys():
            return {}
        growth = [(now[0] - before[device][0], now[1] - before[device][1]) for device, now in counters.items()]
        if any(min(pair) < 0 for pair in growth):
            return {}
        return {name: sum(sizes) / seconds / 1e6 for name, sizes in zip(names, zip(*growth, strict=True), strict=False)}

    def _cpu(self, seconds: float) -> dict[str, float]:
        # user, nice, system, idle, iowait, irq, softirq, steal: https://man7.org/linux/man-pages/man5/proc_stat.5.html
        ticks = [int(field) for field in proc.read(f"{self._root}/proc/stat").partition("\n")[0].split()[1:9]]
        rates = self._rates(("idle", "total"), {"cpu": (sum(ticks[3:5]), sum(ticks))}, seconds)
        return {"cpu": 100 * (1 - rates["idle"] / rates["total"])} if rates.get("total") else {}

    def _network(self, seconds: float) -> dict[str, float]:
        counters = {}
        for line in proc.read(f"{self._root}/proc/net/dev").splitlines()[2:]:
            name, _, fields = line.strip().partition(":")
            if name != "lo":
                counters[name] = (int(fields.split()[8]), int(fields.split()[0]))
        # A bridge, a bond and its interfaces count the same bytes. A container's interface has no device.
        devices = {name: pair for name, pair in counters.items() if self._has_device(f"class/net/{name}")}
        return self._rates(("net/sent_mb_s", "net/recv_mb_s"), devices or counters, seconds)

    def _disks(self, seconds: float) -> dict[str, float]:
        counters = {}
        for line in proc.read(f"{self._root}/proc/diskstats").splitlines():
            _, _, name, _, _, sectors_read, _, _, _, sectors_written, *_ = line.split()
            # Not a partition, nor a volume (LVM, RAID, loop) over disks: they count the same bytes.
            if self._has_device(f"block/{name}"):
                counters[name] = (int(sectors_read) * _SECTOR_BYTES, int(sectors_written) * _SECTOR_BYTES)
        return self._rates(("disk/read_mb_s", "disk/write_mb_s"), counters, seconds)

    def _has_device(self, path: str) -> bool:
        return os.path.exists(f"{self._root}/sys/{path}/device")

    def _memory(self, _: float) -> dict[str, float]:
        """Return how full the machine is, or the fullest cgroup with a limit around this process."""
        sizes = _numbers(proc.read(f"{self._root}/proc/meminfo"))
        shares = [1 - sizes["MemAvailable:"] / sizes["MemTotal:"]] if sizes else []
        for controllers, path in proc.cgroups(self._root).items():
            if controllers not in _CGROUP_FILES:
                continue
            limit_file, used_file, reclaimable = _CGROUP_FILES[controllers]
            parts = path.split("/")
            for end in range(1, len(parts) + 1):
                folder = f"{self._root}/sys/fs/cgroup/{controllers}" + "/".join(parts[:end])
                limit, used = (proc.read(f"{folder}/{file}").strip() for file in (limit_file, used_file))
                if limit.isdecimal() and used.isdecimal() and int(limit):
                    inactive = _numbers(proc.read(f"{folder}/memory.stat")).get(reclaimable, 0)
                    shares.append((int(used) - inactive) / int(limit))
        return {"memory": 100 * max(shares)} if shares else {}

    def _gpus(self) -> dict[str, float]:
        if self._devices is None:
            self._devices = []  # if it raises, it is not called again
            self._devices = self._open_gpus()
        nvml: Any = self._nvml
        values: dict[str, float] = {}
        readers: dict[str, Callable[[Any], Any]] = {
            "util": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory": lambda gpu: 100 * (info := nvml.nvmlDeviceGetMemoryInfo(gpu)).used / info.total,
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temp_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }
        for number, gpu in self._devices:
            for name, read in readers.items():
                try:
                    values[f"gpu/{number}/{name}"] = float(read(gpu))
                except Exception as error:  # a GPU need not have each value
                    self._warn(f"gpus' {name}", error)
        return values

    def _open_gpus(self) -> list[tuple[int, Any]]:
        """Return the GPUs that can be asked, each with its number."""
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:  # a machine without NVIDIA's driver
            return []
        self._nvml = pynvml
        found: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        for number in range(min(pynvml.nvmlDeviceGetCount(), _MOST_GPUS)):
            try:
                found[number] = pynvml.nvmlDeviceGetHandleByIndex(number)
            except Exception as error:  # a GPU that has fallen off the bus
                failed[number] = error
        if failed:
            self._warn(f"GPUs {', '.join(map(str, failed))}", next(iter(failed.values())))
        return list(found.items())


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of lines such as "MemTotal: 24684096 kB" by what stands before them."""
    lines = (line.split() for line in text.splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1}


# What the run shows


def is_sound(load: Mapping[str, Any]) -> bool:
    """Whether a load of the board, whose numbers are finite, can be shown. It may come from a damaged rank."""
    return all(_KEY.fullmatch(key) and type(value) in (int, float) for key, value in load.items())


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
