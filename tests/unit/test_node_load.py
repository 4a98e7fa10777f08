"""The load of a node, as psutil reads it and with an NVML of the test; and what the run shows of many nodes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import pulse
from flyteplugins_tracking._job.board import Board, OwnStore
from flyteplugins_tracking._job.node_load import LoadMeter, metrics
from flyteplugins_tracking._job.pulse import PulseDuty

GIB = 2**30
RATES = {"net/sent_mb_s", "net/recv_mb_s", "disk/read_mb_s", "disk/write_mb_s"}


@pytest.fixture
def meter(monkeypatch):
    """Its first call has been made. The machine has no GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    opened = LoadMeter(psutil)
    assert opened.measure() == {}
    return opened


def test_this_machine_has_a_load(meter):
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        sum(range(1000))
    load = meter.measure()
    meter.close()
    assert 0 < load["cpu"] <= 100
    assert 0 < load["memory"] < 100
    assert {"net/sent_mb_s", "net/recv_mb_s"} <= load.keys() <= {"cpu", "memory", *RATES}
    assert all(load[key] >= 0 for key in RATES & load.keys())


def counted(monkeypatch, sent: int, received: int) -> None:
    devices = {"eth0": SimpleNamespace(bytes_sent=sent, bytes_recv=received), "lo": SimpleNamespace(bytes_sent=10**15)}
    devices["lo"].bytes_recv = 10**15 * time.monotonic()
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: devices)


def test_a_rate_is_in_millions_of_bytes_a_second_without_loopback_and_left_out_when_its_counter_goes_back(
    meter, monkeypatch
):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counted(monkeypatch, 0, 10**9)
    meter.measure()
    counted(monkeypatch, 50 * 10**6, 0)
    now += 10
    load = meter.measure()
    assert (load["net/sent_mb_s"], "net/recv_mb_s" in load) == (5.0, False)
    counted(monkeypatch, 50 * 10**6, 20 * 10**6)
    now += 10
    assert meter.measure()["net/recv_mb_s"] == 2.0


def test_without_psutil_the_pulse_goes_on_without_the_node_and_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "psutil", None)
    rows: list[Any] = []
    duty = PulseDuty(DistributedInfo(0, 1, 0, 1, 0, 1), 0.0, rows.append)
    duty.begin(Board(OwnStore(), ""))
    duty.look()
    duty.end(has_failed=False)
    assert rows
    assert not [key for key in rows[-1] if key.startswith("nodes/")]
    (message,) = caplog.messages
    assert message.endswith("psutil is not installed: pip install 'flyteplugins-tracking[pulse]'")


def test_psutil_is_loaded_only_for_pulse_s():
    program = """
import sys
from flyteplugins_tracking import tracking_init
from flyteplugins_tracking.testing import RecordingTracker
tracking_init(tracker=RecordingTracker())(lambda: None)()
print("psutil" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# GPUs


class Nvml:
    """What `pynvml` has, with two GPUs. Counts its calls."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError_LibraryNotFound(Exception):  # noqa: N801, N818 NVML's own name
        pass

    def __init__(self, broken: str = "", error: type[Exception] = RuntimeError) -> None:
        self.broken, self.error = broken, error
        self.calls: list[str] = []
        self.hangs: dict[str, threading.Event] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self.call(name, *arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if name == self.broken:
            raise self.error("Not Supported.")
        if name in self.hangs:
            self.hangs[name].wait()
        number = arguments[0] if arguments else 0
        return {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetHandleByIndex": number,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90 + number, memory=1),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, total=80 * GIB),
            "nvmlDeviceGetPowerUsage": 655_321,
            "nvmlDeviceGetTemperature": 61,
        }[name]


@pytest.fixture
def nvml(meter, monkeypatch):
    def installed(*args: Any, **kwargs: Any) -> Nvml:
        fake = Nvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        meter._has_gpus = True  # its first call has found none
        return fake

    return installed


def gpus(meter: LoadMeter) -> dict[str, float]:
    return {key: value for key, value in meter.measure().items() if key.startswith("gpu/")}


def of_gpu(number: int) -> dict[str, float]:
    values = {"util": 90.0 + number, "memory": 25.0, "power_w": 655.32, "temp_c": 61.0}
    return {f"gpu/{number}/{name}": value for name, value in values.items()}


def test_each_gpu_has_its_values_and_nvml_is_let_go_at_the_end(meter, nvml):
    fake = nvml()
    assert gpus(meter) == {**of_gpu(0), **of_gpu(1)} == gpus(meter)
    meter.close()
    meter.close()
    assert [fake.calls.count(name) for name in ("nvmlInit", "nvmlShutdown")] == [1, 1]
    assert gpus(meter) == {}


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("nvmlInit", RuntimeError, ["the run does not show the gpus of this node: RuntimeError: Not Supported"]),
        ("nvmlInit", Nvml.NVMLError_LibraryNotFound, []),  # a machine without Nvidia's driver
    ],
)
def test_an_nvml_that_cannot_be_opened_is_asked_once_and_told_once(meter, nvml, caplog, name, error, told):
    fake = nvml(name, error)
    assert [gpus(meter), gpus(meter)] == [{}, {}]
    assert "cpu" in meter.measure()
    assert fake.calls.count(name) == 1
    assert caplog.messages == told
    meter.close()


def test_a_call_of_nvml_that_hangs_costs_the_gpus_alone_and_none_is_made_again(meter, nvml, caplog, monkeypatch):
    monkeypatch.setattr("flyteplugins_tracking._job.node_load._LOOK_S", 0.01)
    fake, name = nvml(), "nvmlDeviceGetTemperature"
    fake.hangs[name] = fake.hangs["nvmlShutdown"] = released = threading.Event()
    assert [gpus(meter), gpus(meter)] == [{}, {}]
    assert "cpu" in meter.measure()
    assert fake.calls.count(name) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the run does not show the gpus of this node: TimeoutError: not within 0.01 s"
    ]
    meter.close()
    assert "nvmlShutdown" not in fake.calls
    released.set()


# What the run shows


def load(gpus: int = 0, **more: float) -> dict[str, float]:
    """A node's load, with the longest numbers that there are."""
    rates = dict.fromkeys(("net/sent_mb_s", "net/recv_mb_s", "disk/read_mb_s", "disk/write_mb_s"), 12345.67)
    of_gpus = {
        f"gpu/{number}/{name}": value
        for number in range(gpus)
        for name, value in {"util": 98.0, "memory": 76.54, "power_w": 1234.56, "temp_c": 104.0}.items()
    }
    return {"cpu": 12.34, "memory": 56.78, **rates, **of_gpus, **more}


def test_up_to_8_nodes_each_is_shown_with_each_of_its_gpus():
    for nodes in (1, 2, 8):
        row = metrics({node: load(8) for node in range(nodes)}, nodes)
        assert len(row) == nodes * 38
        assert row[f"nodes/{nodes - 1}/cpu"] == 12.34
        assert row[f"nodes/{nodes - 1}/gpu/7/power_w"] == 1234.56
        assert metrics({}, nodes) == {}


def test_of_more_nodes_the_range_the_mean_and_the_three_farthest_from_it_are_shown():
    loads = {node: load(2, cpu=10.0 + node % 2) for node in range(64)}
    loads[17]["gpu/1/util"] = 2.0  # one GPU of the node waits
    loads[40]["cpu"] = 70.0
    loads[41]["memory"] = 99.0
    loads[5]["net/sent_mb_s"] = 0.0
    row = metrics(loads, 64)
    assert [row[f"nodes/worst/{place}/node"] for place in (1, 2, 3)] == [17, 40, 41]
    assert (row["nodes/gpu/util/min"], row["nodes/gpu/util/max"]) == (2.0, 98.0)
    assert row["nodes/gpu/util/mean"] == round((127 * 98.0 + 2.0) / 128, 2)
    assert (row["nodes/worst/1/gpu/util"], row["nodes/worst/2/cpu"], row["nodes/worst/3/memory"]) == (50.0, 70.0, 99.0)
    assert row["nodes/net/sent_mb_s/min"] == 0.0
    assert not [key for key in row if key.startswith("nodes/17")]
    assert metrics({3: load(), 4: load()}, 128).keys() < row.keys()  # while few of them are there
    row = metrics({node: load() for node in range(9)}, 9)  # of equal nodes the first ones
    assert [row.get(f"nodes/worst/{place}/node") for place in (1, 2, 3, 4)] == [0, 1, 2, None]


@pytest.mark.parametrize(
    ("info", "node"),
    [
        (DistributedInfo(0, 4, 0, 2, 0, 2), 0),
        (DistributedInfo(1, 4, 1, 2, 0, 2), None),
        (DistributedInfo(2, 4, 0, 2, 1, 2), 1),
        (DistributedInfo(2, 4, 0, 2, launcher="mpich"), None),  # a launcher that does not say which node it is
        (DistributedInfo(2, 4), None),
    ],
)
def test_local_rank_0_alone_measures_its_node(monkeypatch, info, node):
    measured = []
    monkeypatch.setattr(LoadMeter, "measure", lambda self: measured.append(self) or load())
    duty, board = PulseDuty(info, 10.0, None), Board(OwnStore(), "")
    duty.begin(board)
    (found,) = pulse.read(board.of_topic("pulse"), 4).values()
    assert (found.node, found.load) == (node, {} if node is None else load())
    duty.end(has_failed=False)
    assert len(measured) == (node is not None)
    assert pulse.read(board.of_topic("pulse"), 4)[info.rank].load == {}
