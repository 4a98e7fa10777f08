"""How long a training takes to end: after 10,000 rows, and after SIGTERM in the middle of it."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS, BEFORE_SIGNAL = 10_000, 200
FINISH_PAIRS, SIGNAL_ROUNDS = 11, 5
OURS, BARE, SHARED = "ours", "wandb", "ours, shared by 2 ranks"
SETTLING_S = 1.0
MOST_FINISH, MOST_SIGNAL_S = 1.03, 2.0
Log = Callable[[dict[str, Any]], Any]


# In a rank


def finish(log: Log, directory: Path) -> None:
    """Log all rows, and leave."""
    for n in range(ROWS):
        log(row(n))
    time.sleep(SETTLING_S)  # rows come so fast in no training: how far wandb-core is behind with reading is chance
    (directory / "returned").write_text(repr(time.time()))


def be_signalled(log: Log, directory: Path) -> None:
    """Log a row every 10 ms, and go on until the process is ended; tell, row for row, which one was logged."""
    with (directory / f"logged-{os.getpid()}").open("w", buffering=1) as logged:
        for n in range(3000):
            log(row(n))
            logged.write(f"{n}\n")
            time.sleep(0.01)


def row(n: int) -> dict[str, Any]:
    return {"n": n, "rank": int(os.environ.get("RANK", 0)), "loss": 1 / (n + 1), "accuracy": n / ROWS, "lr": 3e-4}


def train(kind: str, what: Callable[[Log, Path], None], directory: Path) -> None:
    if kind == BARE:
        import wandb

        with wandb.init(project="bench") as run:
            what(run.log, directory)
        return
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(project="bench", id="job", run_mode="auto" if kind == OURS else "shared")
    def training() -> None:
        what(get_run().log, directory)

    training()


# In the one who measures


@contextlib.contextmanager
def started(
    python: Path, what: str, kind: str, ranks: int
) -> Iterator[tuple[Any, Path, list[subprocess.Popen[bytes]]]]:
    """A training with a server; no process of it outlives the block."""
    from node import place
    from support import jobs
    from support.wandb_server import WandbServer

    with tempfile.TemporaryDirectory() as name, WandbServer() as server:
        processes = []
        for rank in range(ranks):
            variables = place(rank, ranks) if ranks > 1 else {}
            env = jobs.environment(Path(name), **server.environment, **variables, PYTHONPATH="")
            processes.append(subprocess.Popen([python, __file__, what, kind, name], env=env, cwd=name))
        try:
            yield server, Path(name), processes
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


def measure_finish(python: Path, kind: str) -> dict[str, float]:
    """From the function's return to the process's end, in seconds."""
    with started(python, "finish", kind, 1) as (server, directory, (process,)):
        returncode = process.wait(60)
        ended = time.time()
        (run,) = server.runs
        assert (returncode, run.exit_codes, len(run.rows), run.rows_overwritten) == (0, [0], ROWS, 0)
        return {"finish_s": ended - float((directory / "returned").read_text())}


def measure_signal(python: Path, kind: str) -> dict[str, float]:
    """From SIGTERM to the end of all processes, in seconds; and what was lost of what was logged before that."""
    ranks = 2 if kind == SHARED else 1
    with started(python, "be_signalled", kind, ranks) as (server, directory, processes):
        wait_for(lambda: [len(rows) >= BEFORE_SIGNAL for rows in logged(directory)] == [True] * ranks)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        codes = [process.wait(30) for process in processes]
        seconds = time.monotonic() - signalled
        expected = 128 + signal.SIGTERM
        if kind != BARE:
            assert codes == [expected] * ranks, codes
            assert [run.exit_codes for run in server.runs] == [[expected]]
        arrived = sum(len(run.rows) for run in server.runs)
        return {
            "signal_s": seconds,
            "lost": max(0, sum(len(rows) for rows in logged(directory)) - arrived),
            "told": float([run.exit_codes for run in server.runs] == [[expected]]),
        }


def logged(directory: Path) -> list[list[str]]:
    return [path.read_text().split() for path in directory.glob("logged-*")]


def wait_for(predicate: Callable[[], bool], timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.01)


def main() -> None:
    import paired
    import peers

    python = peers.python("wandb")
    for kind in (OURS, BARE):
        measure_finish(python, kind)  # so that all files are in the cache
    finished = paired.in_turn((OURS, BARE), lambda kind: measure_finish(python, kind), FINISH_PAIRS)
    signalled = paired.in_turn((OURS, SHARED, BARE), lambda kind: measure_signal(python, kind), SIGNAL_ROUNDS)
    end = paired.Quantity("finish_s", "the function's return to the process's end, s", "{:.2f}")
    text = f"{paired.table(f'after {ROWS:,} rows', [end], finished)}\n\n{signal_table(signalled)}"
    ratio = paired.ratio(finished, "finish_s", OURS, BARE)
    slowest = max(paired.median(signalled, kind, "signal_s") for kind in (OURS, SHARED))
    lost = max(one["lost"] for kind in (OURS, SHARED) for one in signalled[kind])
    goals = [
        paired.Goal(
            f"the end of a training after {ROWS:,} rows, against bare wandb",
            f"at most {MOST_FINISH}x",
            f"{ratio:.2f}x",
            ratio <= MOST_FINISH,
        ),
        paired.Goal(
            "SIGTERM to the end of the process, all rows sent and the run ended with 143",
            f"at most {MOST_SIGNAL_S:.0f} s, no row lost",
            f"{slowest:.2f} s, {lost:.0f} lost",
            slowest <= MOST_SIGNAL_S and lost == 0,
        ),
    ]
    of_all = [(f"finish: {kind}", figures) for kind, figures in finished.items()]
    of_all += [(f"signal: {kind}", figures) for kind, figures in signalled.items()]
    paired.publish("shutdown", paired.Result(text, goals, dict(of_all)))


def signal_table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    heads = "to the end of all processes, s | logged rows that did not arrive | the run's status at the service"
    lines = [f"| SIGTERM in a training | {heads} |", "|---|---:|---:|---|"]
    for kind, rounds in found.items():
        seconds, lost = ([one[key] for one in rounds] for key in ("signal_s", "lost"))
        told = "143" if all(one["told"] for one in rounds) else "none: it stays as if it were running"
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        lines.append(f"| {kind} | {spread} | {statistics.median(lost):.0f} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, what, kind, name = sys.argv
        train(kind, {"finish": finish, "be_signalled": be_signalled}[what], Path(name))
    else:
        main()
