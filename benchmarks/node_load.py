"""What the load of all nodes costs: a sample of a node, what it adds to its pulse, and the row of many nodes.

make bench ROWS=node_load

NVML is left out: it was never measured on a machine with GPUs.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

SAMPLES, ROUNDS, GPUS = 200, 15, 8
NODES = (1, 8, 9, 64, 128)
MOST_SAMPLE_MS, MOST_ROW_BYTES, MANY = 1.0, 4000, 128


def sample_us() -> float:
    """The CPU time of a sample of this machine."""
    import psutil

    from flyteplugins_tracking._job.node_load import LoadMeter

    meter = LoadMeter(psutil)
    meter.measure()
    began = time.process_time()
    for _ in range(SAMPLES):
        meter.measure()
    return (time.process_time() - began) / SAMPLES * 1e6


def load() -> dict[str, float]:
    rates = ("net/sent_mb_s", "net/recv_mb_s", "disk/read_mb_s", "disk/write_mb_s")
    limits = {"cpu": 100, "memory": 100, **dict.fromkeys(rates, 5000)}
    for number in range(GPUS):
        limits |= {f"gpu/{number}/{name}": most for name, most in (("memory", 100), ("power_w", 700), ("util", 100))}
        limits[f"gpu/{number}/temp_c"] = 90
    return {key: round(random.uniform(0, most), 2) for key, most in limits.items()}


def row(nodes: int) -> dict[str, float]:
    """What the primary logs for a job of so many nodes, and how long it takes to find out."""
    from flyteplugins_tracking._job.node_load import metrics

    loads = {node: load() for node in range(nodes)}
    began = time.perf_counter()
    values = metrics(loads, nodes)
    taken_ms = (time.perf_counter() - began) * 1e3
    return {"keys": len(values), "bytes": len(json.dumps(values, separators=(",", ":"))), "ms": taken_ms}


def main() -> None:
    import paired

    from flyteplugins_tracking._job.board import to_text
    from flyteplugins_tracking._job.pulse import Pulse

    samples = [{"us": sample_us()} for _ in range(ROUNDS)]
    sample_ms = statistics.median(one["us"] for one in samples) / 1e3
    rows = {nodes: row(nodes) for nodes in NODES}
    plain, loaded = (
        len(to_text(Pulse(0.2, 0.5, 4 << 30, 70 << 30, **more))) for more in ({}, {"node": 1, "load": load()})
    )
    lines = [
        f"| a node with {GPUS} GPUs | |",
        "|---|---:|",
        f"| CPU of a sample by psutil, µs | {sample_ms * 1e3:.0f} |",
        f"| its pulse, bytes; that of another rank | {loaded}; {plain} |",
        "| requests to the store beside those of the pulse | 0 |",
        "",
        "| nodes | keys in the row | bytes | ms to find them |",
        "|---:|---:|---:|---:|",
        *(f"| {nodes} | {one['keys']} | {one['bytes']:,} | {one['ms']:.1f} |" for nodes, one in rows.items()),
    ]
    goals = [
        paired.Goal(
            "a sample of a node's CPU, memory, network and disks",
            f"at most {MOST_SAMPLE_MS:g} ms of CPU",
            f"{sample_ms:.2f} ms",
            sample_ms <= MOST_SAMPLE_MS,
        ),
        paired.Goal(
            f"the row of {MANY} nodes",
            f"at most {MOST_ROW_BYTES:,} bytes",
            f"{rows[MANY]['bytes']:,} bytes",
            rows[MANY]["bytes"] <= MOST_ROW_BYTES,
        ),
    ]
    figures = {"sample": samples, **{f"{nodes} nodes": [one] for nodes, one in rows.items()}}
    figures["pulse"] = [{"bytes": loaded, "plain_bytes": plain}]
    paired.publish("node_load", paired.Result("\n".join(lines), goals, figures))


if __name__ == "__main__":
    sys.exit(main())
