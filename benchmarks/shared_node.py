"""A shared run of one node, against W&B's own shared mode. Both have a client in each rank."""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node import meet, node, wait_for
from paired import Figures, Found, Goal, Quantity, Result, in_turn, publish, ratio, table
from peers import python

KINDS = ("ours", "wandb")
# How often each kind is measured, by the node's ranks.
PAIRS = {8: 5, 4: 3}
# Rows a rank at the pace of a training; and rows of all ranks, as fast as it goes: some seconds of the sender's rhythm.
PACED, PACE_S, FAST = 300, 0.01, 32_000
# How often the client sends. Its own 15 s would be most of what is measured.
INTERVAL_S = 1

QUANTITIES = (
    Quantity("helpers", "helper processes, a wandb-core and its monitor each", "{:.0f}"),
    Quantity("connections", "connections to the service", "{:.0f}"),
    Quantity("paced_pss", "helpers' memory at the pace of a training, PSS, MiB", "{:.0f}"),
    Quantity("paced_rss", "the same, RSS, MiB", "{:.0f}"),
    Quantity("paced_anonymous", "the same, without pages of files, MiB", "{:.0f}"),
    Quantity("fast_pss", "helpers' memory after the burst, PSS, MiB", "{:.0f}"),
    Quantity("fast_rss", "the same, RSS, MiB", "{:.0f}"),
    Quantity("all_pss", "with the ranks' own, at the pace of a training, PSS, MiB", "{:.0f}"),
    Quantity("first_s", "process start to the last rank's first row, s", "{:.2f}"),
    Quantity("paced_us", "one `log` of 5 keys, every 10 ms, us", "{:.0f}"),
    Quantity("fast_us", "one `log`, all ranks as fast as they can, us", "{:.0f}"),
    Quantity("rows_s", "rows a second then, until all have arrived", "{:.0f}"),
    Quantity("cpu_us", "processor time of one such row, ranks and helpers, us", "{:.0f}"),
)


# In a rank


def log_rows(log: Callable[[dict[str, Any]], object], directory: Path, rank: int, paced: int, fast: int) -> None:
    """Log one row; and when all have, a row every 10 ms; and when all have, rows as fast as it goes."""
    log({"first": 1})
    figures = {"first_s": time.time() - float(os.environ["STARTED"])}
    for moment, rows, pace_s in (("paced", paced, PACE_S), ("fast", fast, 0.0)):
        meet(directory, rank, moment)
        taken = [0.0]
        for n in range(rows):
            row = {"n": n, "rank": rank, "loss": 1 / (n + 1), "accuracy": n / rows, "lr": 3e-4}
            began = time.perf_counter()
            log(row)
            taken.append(time.perf_counter() - began)
            if pace_s:
                time.sleep(pace_s)
        figures[f"{moment}_us"] = statistics.median(taken) * 1e6
    (directory / f"figures-{rank}").write_text(json.dumps(figures))
    wait_for(directory / "leave")


def tracked(run_mode: Any, directory: Path, rank: int, paced: int, fast: int) -> None:
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench", run_mode=run_mode, id="one")
    def train() -> None:
        run = get_run()
        log_rows(run.log if run is not None else lambda _: None, directory, rank, paced, fast)

    train()


def shared_by_wandb(directory: Path, rank: int, paced: int, fast: int) -> None:
    """As W&B's documentation has it."""
    import wandb

    is_primary = rank == 0
    settings = wandb.Settings(
        mode="shared", x_label=f"rank-{rank}", x_primary=is_primary, x_update_finish_state=is_primary
    )
    with wandb.init(project="bench", id="one", settings=settings) as run:
        log_rows(run.log, directory, rank, paced, fast)


KIND: dict[str, Callable[[Path, int, int, int], None]] = {
    "ours": functools.partial(tracked, "shared"),
    "auto": functools.partial(tracked, "auto"),
    "wandb": shared_by_wandb,
}


# In the one who measures


def measure(kind: str, ranks: int, paced: int = PACED, fast: int = FAST) -> Figures:
    """One node of so many ranks, each of which logs `paced` rows and its part of `fast`."""
    from support.jobs import environment
    from support.wandb_server import WandbServer

    writers = 1 if kind == "auto" else ranks
    fast //= ranks
    with tempfile.TemporaryDirectory() as name, WandbServer() as server:
        directory = Path(name)
        interval = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": str(INTERVAL_S)}
        variables = environment(directory, **server.environment, **interval, PYTHONPATH="")
        command = [str(interpreter()), __file__, kind, name, str(paced), str(fast)]

        def await_rows(count: int) -> None:
            server.wait_for(lambda: bool(server.runs) and len(server.runs[0].rows) == count, 120)

        with node(ranks, lambda rank: [*command, str(rank)], directory, variables) as running:
            running.await_all("paced")
            running.release("paced")
            running.await_all("fast")
            await_rows(writers * (1 + paced))
            helpers, everything = running.memory()
            took_s = running.cpu_s()
            began = running.release("fast")
            await_rows(writers * (1 + paced + fast))
            seconds = time.monotonic() - began
            for rank in range(ranks):
                wait_for(directory / f"figures-{rank}")
            took_s = running.cpu_s() - took_s
            after, _ = running.memory()
            running.release("leave")
            running.leave()
        (run,) = server.runs
        assert (len(run.rows), run.rows_overwritten) == (writers * (1 + paced + fast), 0)
        of_ranks = [json.loads((directory / f"figures-{rank}").read_text()) for rank in range(ranks)]
    return {
        "helpers": helpers.processes,
        "connections": run.connections,
        "paced_pss": helpers.pss,
        "paced_rss": helpers.rss,
        "paced_anonymous": helpers.anonymous,
        "fast_pss": after.pss,
        "fast_rss": after.rss,
        "all_pss": everything.pss,
        "first_s": max(one["first_s"] for one in of_ranks),
        "paced_us": statistics.median(one["paced_us"] for one in of_ranks),
        "fast_us": statistics.median(one["fast_us"] for one in of_ranks),
        "rows_s": writers * fast / seconds,
        "cpu_us": took_s * 1e6 / max(1, writers * fast),
    }


@functools.cache
def interpreter() -> Path:
    return python("wandb")


def main() -> None:
    by_ranks = {ranks: in_turn(KINDS, functools.partial(measure, ranks=ranks), pairs) for ranks, pairs in PAIRS.items()}
    tables = [table(f"{ranks} ranks on a node", QUANTITIES, found) for ranks, found in by_ranks.items()]
    figures = {f"{kind}, {ranks} ranks": one for ranks, found in by_ranks.items() for kind, one in found.items()}
    publish("shared_node", Result("\n\n".join(tables), goals(by_ranks[8]), figures))


def goals(found: Found) -> list[Goal]:
    """Of a node of eight ranks."""
    memory, rows, first = (ratio(found, key, *KINDS) for key in ("paced_pss", "rows_s", "first_s"))
    where = "8 ranks, shared: "
    return [
        Goal(f"{where}memory of the helpers (PSS)", "at most 1.1x", f"{memory:.2f}x", memory <= 1.1),
        Goal(f"{where}rows a second", "at least 0.9x", f"{rows:.2f}x", rows >= 0.9),
        Goal(f"{where}first row", "at most 1.2x", f"{first:.2f}x", first <= 1.2),
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        kind, directory, *numbers = sys.argv[1:]
        paced, fast, rank = map(int, numbers)
        KIND[kind](Path(directory), rank, paced, fast)
    else:
        main()
