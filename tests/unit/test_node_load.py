"""The load of a node, from texts of the kernel's and an NVML of the test; and what the run shows of many nodes."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.stores import SharedStore

from flyteplugins_tracking import DistributedInfo
from flyteplugins_tracking._job import progress, pulse
from flyteplugins_tracking._job.board import Board, OwnStore, to_text
from flyteplugins_tracking._job.node_load import LoadMeter, is_sound, metrics
from flyteplugins_tracking._job.pulse import Pulse, PulseDuty

GIB = 2**30
NET_HEAD = (
    "Inter-|   Receive | Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
)


class Machine:
    """A directory with what the kernel says. Times are the test's."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setitem(sys.modules, "pynvml", None)
        self.meter = LoadMeter(str(root))

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cpu(self, idle: int, busy: int) -> None:
        self.write("proc/stat", f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1")

    def net(self, **received_and_sent: tuple[int, int]) -> None:
        lines = [f"{name:>6}: {got} 1 0 0 0 0 0 0 {sent} 2 0 0" for name, (got, sent) in received_and_sent.items()]
        self.write("proc/net/dev", NET_HEAD + "\n".join(lines))

    def disk(self, **read_and_written: tuple[int, int]) -> None:
        lines = [f"8 0 {name} 9 9 {read // 512} 9 9 9 {wrote // 512} 9 0 9 9" for name, (read, wrote) in
                 read_and_written.items()]  # fmt: skip
        self.write("proc/diskstats", "\n".join(lines))

    def device(self, path: str) -> None:
        (self.root / "sys" / path / "device").mkdir(parents=True)

    def after(self, seconds: float) -> dict[str, float]:
        self.now += seconds
        return self.meter.measure()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


# CPU, network and disks


def test_cpu_is_the_share_of_the_time_since_the_last_call_in_which_it_was_not_idle(machine):
    machine.cpu(idle=1000, busy=1000)
    assert machine.meter.measure() == {}
    machine.cpu(idle=1030, busy=1010)
    assert machine.after(10) == {"cpu": 25.0}
    machine.cpu(idle=1030, busy=1110)
    assert machine.after(10) == {"cpu": 100.0}


def test_waiting_for_a_disk_is_idle_time(machine):
    machine.cpu(idle=0, busy=0)
    machine.meter.measure()
    machine.write("proc/stat", "cpu 10 10 10 30 20 10 5 5 99 99")
    assert machine.after(1) == {"cpu": 50.0}


def test_the_network_is_what_the_interfaces_have_sent_and_received_without_loopback(machine):
    machine.net(lo=(0, 0), eth0=(0, 10**6), eth1=(0, 0))
    machine.meter.measure()
    machine.net(lo=(10**9, 10**9), eth0=(20 * 10**6, 41 * 10**6), eth1=(0, 10**7))
    assert machine.after(10) == {"net/sent_mb_s": 5.0, "net/recv_mb_s": 2.0}


def test_a_bond_and_a_bridge_are_not_counted_beside_their_interfaces(machine):
    machine.device("class/net/eth0")
    machine.net(eth0=(0, 0), bond0=(0, 0), docker0=(0, 0))
    machine.meter.measure()
    machine.net(eth0=(10**6, 2 * 10**6), bond0=(10**6, 2 * 10**6), docker0=(10**6, 2 * 10**6))
    assert machine.after(1) == {"net/sent_mb_s": 2.0, "net/recv_mb_s": 1.0}


def test_disks_are_counted_once_without_their_partitions_and_volumes(machine):
    machine.device("block/sda")
    machine.device("block/nvme0n1")
    machine.disk(sda=(0, 0), sda1=(0, 0), nvme0n1=(0, 0), loop0=(0, 0), **{"dm-0": (0, 0)})
    machine.meter.measure()
    moved = (512 * 10**6, 1024 * 10**6)
    machine.disk(sda=moved, sda1=moved, nvme0n1=moved, loop0=moved, **{"dm-0": moved})
    assert machine.after(512) == {"disk/read_mb_s": 2.0, "disk/write_mb_s": 4.0}


@pytest.mark.parametrize(
    "later",
    [
        {"eth0": (5, 10**9), "eth1": (10**9, 10**9)},  # a counter of 32 bits has wrapped
        {"eth0": (10**9, 10**9)},
        {"eth0": (10**9, 10**9), "eth1": (10**9, 10**9), "eth2": (10**9, 10**9)},
    ],
    ids=["goes back", "a device has gone", "a device has come"],
)
def test_a_rate_that_is_not_known_is_left_out_until_it_is_again(machine, later):
    machine.net(eth0=(10**6, 10**6), eth1=(10**6, 10**6))
    machine.meter.measure()
    machine.net(**later)
    assert machine.after(10) == {}
    machine.net(**{name: (got + 10**7, sent) for name, (got, sent) in later.items()})
    assert machine.after(10) == {"net/sent_mb_s": 0.0, "net/recv_mb_s": 1.0 * len(later)}


def test_idle_time_that_goes_back_and_no_time_at_all_give_no_share(machine):
    machine.cpu(idle=1000, busy=1000)
    machine.meter.measure()
    machine.cpu(idle=999, busy=1010)
    assert machine.after(1) == {}
    assert machine.after(1) == {}  # no tick


# Memory


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0"


def test_memory_is_what_is_not_available(machine):
    machine.write("proc/meminfo", meminfo(100 * GIB, 60 * GIB))
    assert machine.meter.measure() == {"memory": 40.0}


def test_a_containers_limit_counts_if_it_is_nearer_without_what_the_kernel_takes_back(machine):
    machine.write("proc/meminfo", meminfo(100 * GIB, 60 * GIB))
    machine.write("proc/self/cgroup", "0::/")
    machine.write("sys/fs/cgroup/memory.max", 10 * GIB)
    machine.write("sys/fs/cgroup/memory.current", 9 * GIB)
    machine.write("sys/fs/cgroup/memory.stat", f"anon 1\ninactive_file {GIB}")
    assert machine.meter.measure() == {"memory": 80.0}
    machine.write("sys/fs/cgroup/memory.max", "max")
    assert machine.meter.measure() == {"memory": 40.0}


def test_a_limit_of_a_cgroup_around_the_processs_own_counts(machine):
    machine.write("proc/self/cgroup", "0::/system.slice/job_4711/step_0")
    job = "sys/fs/cgroup/system.slice/job_4711"
    machine.write(f"{job}/memory.max", 4 * GIB)
    machine.write(f"{job}/memory.current", 3 * GIB)
    machine.write(f"{job}/step_0/memory.max", "max")
    machine.write(f"{job}/step_0/memory.current", GIB)
    assert machine.meter.measure() == {"memory": 75.0}


@pytest.mark.parametrize("folder", ["docker/4711", ""], ids=["the host's path", "a container sees its own only"])
def test_version_1_of_cgroups_has_other_files(machine, folder):
    machine.write("proc/meminfo", meminfo(100 * GIB, 60 * GIB))
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/docker/4711\n1:cpu,cpuacct:/\n0::/")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 50 * GIB)
    machine.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", 10 * GIB)
    machine.write(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", 6 * GIB)
    machine.write(f"sys/fs/cgroup/memory/{folder}/memory.stat", f"total_inactive_file {GIB}")
    assert machine.meter.measure() == {"memory": 50.0}


# What is not there, or is not as it should be


def test_without_proc_nothing_is_measured_and_nothing_said(machine, caplog):
    assert [machine.meter.measure(), machine.after(1)] == [{}, {}]
    assert caplog.records == []


def test_a_text_that_cannot_be_read_costs_its_values_with_one_warning(machine, caplog):
    machine.cpu(idle=0, busy=0)
    machine.write("proc/diskstats", "garbage")
    machine.meter.measure()
    machine.cpu(idle=1, busy=1)
    assert machine.after(1) == {"cpu": 50.0}
    assert [record.getMessage() for record in caplog.records] == [
        "the run does not show the disks of this node: ValueError: "
        "not enough values to unpack (expected at least 10, got 1)"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the machine's own /proc")
def test_this_machine_has_a_load():
    meter = LoadMeter()
    meter.measure()
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        sum(range(1000))
    load = meter.measure()
    meter.close()
    assert 0 < load["cpu"] <= 100
    assert 0 < load["memory"] < 100
    assert is_sound(load)


# GPUs


class Nvml:
    """What `pynvml` has, with two GPUs. Counts its calls."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError_LibraryNotFound(Exception):  # noqa: N801, N818 NVML's own name
        pass

    def __init__(self, broken: str = "", error: type[Exception] = RuntimeError, gpus: int = 2) -> None:
        self.broken, self.error, self.gpus = broken, error, gpus
        self.calls: list[str] = []
        self.lost: set[int] = set()  # the GPUs without a handle
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
        if name == "nvmlDeviceGetHandleByIndex" and number in self.lost:
            raise RuntimeError("GPU is lost")
        return {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": self.gpus,
            "nvmlDeviceGetHandleByIndex": number,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90 + number, memory=1),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, total=80 * GIB),
            "nvmlDeviceGetPowerUsage": 655_321,
            "nvmlDeviceGetTemperature": 61,
        }[name]


@pytest.fixture
def nvml(machine, monkeypatch):
    def installed(*args: Any, **kwargs: Any) -> Nvml:
        fake = Nvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return installed


def of_gpu(number: int) -> dict[str, float]:
    values = {"util": 90.0 + number, "memory": 25.0, "power_w": 655.32, "temp_c": 61.0}
    return {f"gpu/{number}/{name}": value for name, value in values.items()}


def test_each_gpu_has_its_values_and_nvml_is_let_go_at_the_end(machine, nvml):
    fake = nvml()
    assert machine.meter.measure() == {**of_gpu(0), **of_gpu(1)} == machine.after(1)
    machine.meter.close()
    machine.meter.close()
    assert [fake.calls.count(name) for name in ("nvmlInit", "nvmlShutdown")] == [1, 1]
    assert machine.after(1) == {}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount"])
def test_an_nvml_that_cannot_be_opened_is_asked_once_and_told_once(machine, nvml, caplog, name):
    fake = nvml(name)
    machine.cpu(idle=0, busy=0)
    machine.meter.measure()
    machine.cpu(idle=1, busy=1)
    assert machine.after(1) == {"cpu": 50.0}
    assert machine.after(1) == {}
    assert fake.calls.count(name) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the run does not show the gpus of this node: RuntimeError: Not Supported"
    ]
    machine.meter.close()


@pytest.mark.parametrize(("lost", "text"), [({0}, "GPUs 0"), ({1}, "GPUs 1"), ({0, 1}, "GPUs 0, 1")])
def test_a_gpu_without_a_handle_costs_its_own_values_with_one_warning(machine, nvml, caplog, lost, text):
    fake = nvml()
    fake.lost = lost
    expected = {key: value for gpu in (0, 1) if gpu not in lost for key, value in of_gpu(gpu).items()}
    assert machine.meter.measure() == expected == machine.after(1)
    assert [record.getMessage() for record in caplog.records] == [
        f"the run does not show the {text} of this node: RuntimeError: GPU is lost"
    ]


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
def test_a_call_of_nvml_that_hangs_costs_the_gpus_alone_and_is_not_made_again(machine, nvml, caplog, monkeypatch, name):
    monkeypatch.setattr("flyteplugins_tracking._job.node_load._LOOK_S", 0.01)
    fake = nvml()
    fake.hangs[name] = released = threading.Event()
    machine.write("proc/meminfo", meminfo(100 * GIB, 60 * GIB))
    assert [machine.meter.measure(), machine.after(1), machine.after(10), machine.after(10)] == [{"memory": 40.0}] * 4
    assert fake.calls.count(name) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the run does not show the gpus of this node: TimeoutError: NVML does not answer, and is asked no more until "
        "it does"
    ]
    machine.meter.close()
    assert "nvmlShutdown" not in fake.calls
    released.set()
    (thread,) = (one for one in threading.enumerate() if one.name.endswith("nvml"))
    thread.join()


def test_an_nvml_that_is_slow_is_shown_by_the_next_look(machine, nvml, caplog, monkeypatch):
    monkeypatch.setattr("flyteplugins_tracking._job.node_load._LOOK_S", 0.01)
    fake = nvml()
    fake.hangs["nvmlInit"] = ready = threading.Event()
    assert machine.meter.measure() == {}
    (thread,) = (one for one in threading.enumerate() if one.name.endswith("nvml"))
    ready.set()
    thread.join()
    assert machine.after(1) == {**of_gpu(0), **of_gpu(1)}
    assert caplog.records == []
    machine.meter.close()


def test_an_end_of_nvml_that_hangs_is_not_waited_for(machine, nvml, monkeypatch):
    fake = nvml()
    machine.meter.measure()
    fake.hangs["nvmlShutdown"] = released = threading.Event()
    monkeypatch.setattr("flyteplugins_tracking._job.node_load._LOOK_S", 0.01)
    machine.meter.close()
    released.set()


def test_a_machine_without_nvidias_driver_has_no_gpus_and_says_nothing(machine, nvml, caplog):
    fake = nvml("nvmlInit", Nvml.NVMLError_LibraryNotFound)
    assert [machine.meter.measure(), machine.after(1)] == [{}, {}]
    assert (fake.calls, caplog.records) == (["nvmlInit"], [])


def test_a_value_that_a_gpu_does_not_have_is_told_once_and_the_others_are_there(machine, nvml, caplog):
    nvml("nvmlDeviceGetPowerUsage")
    expected = {key: value for key, value in {**of_gpu(0), **of_gpu(1)}.items() if "power" not in key}
    assert machine.meter.measure() == expected == machine.after(1)
    assert [record.getMessage() for record in caplog.records] == [
        "the run does not show the gpus' power_w of this node: RuntimeError: Not Supported"
    ]


def test_the_first_16_gpus_of_a_node_are_shown(machine, nvml):
    nvml(gpus=40)
    load = machine.meter.measure()
    assert len(load) == 16 * 4
    assert is_sound(load)


def test_a_module_of_that_name_that_is_another_one_costs_the_gpus_alone(machine, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(__name__="pynvml"))
    machine.write("proc/meminfo", meminfo(100 * GIB, 60 * GIB))
    assert machine.meter.measure() == {"memory": 40.0} == machine.after(1)
    assert len(caplog.records) == 1


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


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_up_to_8_nodes_each_is_shown_with_each_of_its_gpus(nodes):
    row = metrics({node: load(8) for node in range(nodes)}, nodes)
    assert len(row) == nodes * 38
    assert row[f"nodes/{nodes - 1}/cpu"] == 12.34
    assert row[f"nodes/{nodes - 1}/gpu/7/power_w"] == 1234.56


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


def test_of_equal_nodes_the_first_ones_are_shown():
    row = metrics({node: load() for node in range(9)}, 9)
    assert [row.get(f"nodes/worst/{place}/node") for place in (1, 2, 3, 4)] == [0, 1, 2, None]


@pytest.mark.parametrize("nodes", [9, 64, 128, 1024])
def test_a_row_of_many_nodes_is_below_4_kilobytes(nodes):
    random = Random(1)
    loads = {
        node: {key: round(random.uniform(0, value), 2) for key, value in load(16).items()} for node in range(nodes)
    }
    assert len(json.dumps(metrics(loads, nodes))) < 4000


def test_a_job_of_many_nodes_keeps_its_keys_while_few_of_them_are_there():
    row = metrics({3: load(), 4: load()}, 128)
    assert (row["nodes/cpu/mean"], row["nodes/worst/1/node"], "nodes/worst/3/node" in row) == (12.34, 3, False)
    assert metrics({}, 128) == metrics({}, 2) == {}


# From the board


@pytest.mark.parametrize(
    "value",
    [{"cpu": "99"}, {"cpu": None}, {"cpu": True}, {"cpu": [1]}, {"rm -rf": 1.0}, {"gpu/16/util": 1.0}, {"cpu\n": 1.0}],
)
def test_a_load_with_anything_else_is_not_sound(value):
    assert is_sound(load(16))
    assert not is_sound({**load(16), **value})


class Job:
    """The board of a job of nodes with one rank each, and the primary's duty."""

    def __init__(self, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LoadMeter, "measure", lambda _: load())
        monkeypatch.setattr(progress, "count_optimizer_steps", lambda: None)  # its hook would outlive the test
        self.board = Board(SharedStore(), "")
        self.rows: list[dict[str, float]] = []
        self.duties = [
            PulseDuty(DistributedInfo(node, nodes, 0, 1, node, nodes), 10.0, self.show if node == 0 else None)
            for node in range(nodes)
        ]
        for duty in self.duties:
            duty.begin(self.board)

    def show(self, values: Any) -> None:
        self.rows.append(dict(values))

    def put(self, rank: int, text: str) -> None:
        self.board.of_topic("pulse").put(str(rank), text)

    def shown_after(self, seconds: float, *ranks: int) -> set[str]:
        """The nodes in the primary's next row, before which these ranks have put a pulse."""
        self.now += seconds
        for rank in (*ranks, 0):
            self.duties[rank].look()
        return {key.split("/")[1] for key in self.rows[-1] if key.startswith("nodes/")}


def test_a_job_without_a_store_shows_the_load_of_one_node_and_nothing_of_ranks_until_it_has_one(monkeypatch):
    job = Job(2, monkeypatch)
    job.duties[0].begin(Board(OwnStore(), ""))
    assert job.shown_after(100.0) == {"0"}
    assert not any(key.startswith("ranks/") for key in job.rows[-1])
    job.duties[0].begin(job.board)
    assert job.shown_after(10.0, 1) == {"0", "1"}
    assert job.rows[-1]["ranks/silent"] == 0


def test_a_node_that_is_silent_is_not_shown(monkeypatch):
    job = Job(2, monkeypatch)
    assert job.shown_after(10.1, 1) == {"0", "1"}
    assert job.shown_after(10.1) == {"0", "1"}
    assert job.shown_after(10.1) == {"0"}
    assert job.shown_after(10.1, 1) == {"0", "1"}


def test_a_node_whose_function_has_ended_is_not_shown(monkeypatch):
    job = Job(2, monkeypatch)
    assert job.shown_after(10.1, 1) == {"0", "1"}
    job.duties[1].end(has_failed=False)
    assert job.shown_after(10.1) == {"0"}


def of_node(**fields: Any) -> str:
    return json.dumps({"node": 1, "load": load(), "put_at": 4e9, **fields})


@pytest.mark.parametrize(
    "text",
    [
        of_node(load={"cpu": "50"}),
        of_node(load={"password": 1}),
        of_node(load={f"gpu/{number}/util": 1.0 for number in range(17)}),
        of_node(load=[1, 2]),
        of_node(load={"cpu": math.nan}),
        of_node(load={"cpu": math.inf}),
        of_node(node=3),
        of_node(node=-1),
        of_node(node=True),
        of_node(load={**load(), "memory": 10**30}),
        of_node(load={f"cpu{' ' * number}": 1.0 for number in range(500)}),
        of_node()[:-20],
        "[" * 100_000,
        "",
    ],
)
def test_a_damaged_load_is_left_out_with_one_warning(monkeypatch, caplog, text):
    monkeypatch.setattr("flyteplugins_tracking._job.board._warn_once", pulse.WarnOnce(logging.getLogger("board")))
    job = Job(3, monkeypatch)
    job.put(1, text)
    assert job.shown_after(10.1, 2) == {"0", "2"}
    assert job.shown_after(10.1, 2) == {"0", "2"}
    assert len(caplog.records) == 1
    assert job.shown_after(10.1, 1, 2) == {"0", "1", "2"}


def test_random_changes_of_a_pulse_raise_nothing_and_show_finite_numbers(monkeypatch):
    job, random, text = Job(3, monkeypatch), Random(1), of_node(load=load(8))
    for _ in range(300):
        changed = bytearray(text.encode())
        for _ in range(random.randint(1, 5)):
            changed[random.randrange(len(changed))] = random.choice([*b'0123456789eE+-"[]{}', random.randrange(256)])
        job.put(1, changed.decode(errors="replace"))
        job.shown_after(10.1)
        assert all(math.isfinite(value) for value in job.rows[-1].values())


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


def test_the_load_costs_the_board_no_request_of_its_own_and_fits_into_a_pulse():
    text = to_text(Pulse(0.1234567890123456, 0.123456789012345, 2**40, 2**40, node=127, load=load(16)))
    board = Board(OwnStore(), "pulse")
    board.put("0", " " * len(text) + text)
    assert pulse.read(board, 1)[0].load == load(16)
