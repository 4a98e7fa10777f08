"""A shared run of one node: one writer that the ranks attach to, against W&B's own shared mode with a client per rank.

    make bench

runs the two in turn, on the real client against the recording server on loopback, and writes medians and spread into
docs/performance.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- shared runs begin -->", "<!-- shared runs end -->"
# Rows a rank, at the pace of a training and as fast as it goes; how often each kind is measured; ranks of the node.
PACED, ROWS, PAIRS, RANKS = 300, 3000, 5, (2, 4, 8)
PACE_S = 0.01
KINDS = ("attached", "client per rank")
Figures = dict[str, float]


def wait_for(path: Path, timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(path)
        time.sleep(0.005)


# In a rank


def log_rows(log: Callable[[dict[str, Any]], object], directory: Path, rank: int) -> None:
    """Log one row; and when all have, a row every 10 ms; and when all have, rows as fast as it goes."""
    log({"first": 1})
    figures = {"first_s": time.time() - float(os.environ["STARTED"])}
    for phase, rows, pace_s in (("paced", PACED, PACE_S), ("fast", ROWS, 0.0)):
        (directory / f"ready-{phase}-{rank}").touch()
        wait_for(directory / phase)
        taken = []
        for n in range(rows):
            row = {"n": n, "rank": rank, "loss": 1 / (n + 1), "accuracy": n / rows, "lr": 3e-4}
            began = time.perf_counter()
            log(row)
            taken.append(time.perf_counter() - began)
            if pace_s:
                time.sleep(pace_s)
        figures[f"{phase}_us"] = statistics.median(taken) * 1e6
    (directory / f"figures-{rank}").write_text(json.dumps(figures))
    wait_for(directory / "leave")


def attached(directory: Path, rank: int) -> None:
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench", run_mode="shared", id="shared")
    def train() -> None:
        log_rows(get_run().log, directory, rank)

    train()


def client_per_rank(directory: Path, rank: int) -> None:
    """As W&B's documentation has it."""
    import wandb

    is_primary = rank == 0
    settings = wandb.Settings(
        mode="shared", x_label=f"rank-{rank}", x_primary=is_primary, x_update_finish_state=is_primary
    )
    with wandb.init(project="bench", id="shared", settings=settings) as run:
        log_rows(run.log, directory, rank)


# In the one who measures


def measure(kind: str, ranks: int) -> Figures:
    """One node of so many ranks."""
    from support.jobs import environment
    from support.wandb_server import WandbServer

    with tempfile.TemporaryDirectory() as name, WandbServer() as server:
        directory = Path(name)
        processes = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
            variables = {**server.environment, **{key: str(value) for key, value in place.items()}}
            variables |= {"STARTED": str(time.time()), "WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}
            command = [sys.executable, __file__, "rank", kind, name, str(rank)]
            env = environment(directory, **variables)
            processes.append(subprocess.Popen(command, env=env, cwd=directory, stdout=subprocess.DEVNULL))
        for phase in ("paced", "fast"):
            for rank in range(ranks):
                wait_for(directory / f"ready-{phase}-{rank}")
            (directory / phase).touch()
            began = time.monotonic()
        expected = ranks * (1 + PACED + ROWS)
        server.wait_for(lambda: bool(server.runs) and len(server.runs[0].rows) == expected, 300)
        seconds = time.monotonic() - began
        helpers, helpers_mib, all_mib = memory_of_children(processes)
        (directory / "leave").touch()
        assert [process.wait(60) for process in processes] == [0] * ranks
        (run,) = server.runs
        assert (len(run.rows), run.rows_overwritten) == (expected, 0)
        of_ranks = [json.loads((directory / f"figures-{rank}").read_text()) for rank in range(ranks)]
        return {
            "helpers": helpers,
            "helpers_mib": helpers_mib,
            "all_mib": all_mib,
            "connections": run.connections,
            "first_s": max(one["first_s"] for one in of_ranks),
            "paced_us": statistics.median(one["paced_us"] for one in of_ranks),
            "fast_us": statistics.median(one["fast_us"] for one in of_ranks),
            "rows_s": ranks * ROWS / seconds,
        }


def memory_of_children(processes: list[subprocess.Popen[bytes]]) -> tuple[int, float, float]:
    """How many processes these have started, their memory in MiB, and that with the ranks' own."""
    own = {process.pid for process in processes}
    helpers = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent(pid) in own}
    helpers |= {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent(pid) in helpers}
    return len(helpers), sum(map(pss_mib, helpers)), sum(map(pss_mib, helpers | own))


def parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def pss_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


ROWS_OF_THE_TABLE = (
    ("helpers", "helper processes", "{:.0f}"),
    ("helpers_mib", "their memory (PSS), MiB", "{:.0f}"),
    ("all_mib", "with the ranks' own, MiB", "{:.0f}"),
    ("connections", "connections to the service", "{:.0f}"),
    ("first_s", "process start to the last rank's first row, s", "{:.2f}"),
    ("paced_us", "one `log` of 5 keys, every 10 ms, us", "{:.0f}"),
    ("fast_us", "one `log`, all ranks as fast as they can, us", "{:.0f}"),
    ("rows_s", "rows a second then, until all have arrived", "{:.0f}"),
)


def table(ranks: int, found: dict[str, list[Figures]]) -> str:
    lines = [f"| {ranks} ranks on a node | attached | client per rank | ratio |", "|---|---:|---:|---:|"]
    for name, title, form in ROWS_OF_THE_TABLE:
        values = [[one[name] for one in found[kind]] for kind in KINDS]
        cells = [f"{form.format(statistics.median(v))} ({form.format(min(v))}-{form.format(max(v))})" for v in values]
        ratio = statistics.median(a / b for a, b in zip(*values, strict=True))
        lines.append(f"| {title} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def main(page: Path) -> None:
    tables = []
    for ranks in RANKS:
        found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
        for pair in range(PAIRS):
            for kind in KINDS if pair % 2 == 0 else reversed(KINDS):
                found[kind].append(measure(kind, ranks))
        tables.append(table(ranks, found))
        print(tables[-1], flush=True)
    import wandb

    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, wandb {wandb.__version__}"
    about = f"Measured {time.strftime('%F')} on {machine}; {PAIRS} pairs in turn: median (range)."
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{about}\n\n" + "\n\n".join(tables) + f"\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        _, _, kind, name, rank = sys.argv
        {"attached": attached, "client per rank": client_per_rank}[kind](Path(name), int(rank))
    else:
        main(Path(sys.argv[1]))
