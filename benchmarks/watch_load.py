"""Measure what `send --watch` takes while it sends much: memory, and a processor's time.

Offline runs of W&B that have ended, copies of one, beside some that log on. The recording server counts rows and keeps
none. `python benchmarks/watch_load.py [ENDED] [ROWS] [LIVE]`: by default 90 runs of 110,000 rows, and 10 at 10 rows/s.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from support import wandb_store
from support.wandb_server import WandbServer

JOB = """
import sys, time
from flyteplugins_tracking import get_run, tracking_init
@tracking_init(project="p", id=sys.argv[1])
def train():
    for n in range(int(sys.argv[2])):
        get_run().log({"n": n, "loss": 1 / (n + 1)})
        time.sleep(float(sys.argv[3]))
train()
"""
OWN = [sys.executable, "-m", "flyteplugins_tracking", "send", "--watch", "--until-done", "."]
FIRST = "run00000"
# W&B's file has 7 bytes, and then blocks, of chunks with a header each. No header stands across two blocks.
BLOCK, HEADER, IDENT = 32768, struct.Struct("<IHB"), 7
# How often the figures are taken, how long live runs go on when the others are sent, and the limit, in seconds.
EVERY_S, LIVE_S, LONGEST_S = 15.0, 120.0, 3000.0


class CountedRun(wandb_store.RecordedRun):
    """A run that counts its rows, and keeps the last one. A row that comes twice has an offset that was there."""

    total = twice = 0

    def _take(self, name: str, offset: int, lines: list[str], client: str) -> None:
        if name == wandb_store.HISTORY:
            self.twice += max(0, min(self.total - offset, len(lines)))
            self.total = max(self.total, offset + len(lines))
            self._rows = {(client, self.total - 1): json.loads(lines[-1])}
            self._counted = [(time.monotonic(), self.total)]
        else:
            super()._take(name, offset, lines[-1:], client)

    def _note(self) -> None:
        """Keep no past."""


def copy(directory: Path, run_id: str) -> None:
    """Copy an offline run under another id of the same length."""
    old, new = FIRST.encode(), run_id.encode()
    made = shutil.copytree(directory, directory.with_name(directory.name.replace(FIRST, run_id)), symlinks=True)
    for path in sorted(made.rglob("*"), reverse=True):
        if path.is_file() and not path.is_symlink():
            data = bytearray(path.read_bytes())
            path.write_bytes(renamed(data, old, new) if path.suffix == ".wandb" else data.replace(old, new))
        path.rename(path.with_name(path.name.replace(FIRST, run_id)))


def renamed(data: bytearray, old: bytes, new: bytes) -> bytearray:
    """Replace text in the chunks of W&B's file, with their checksums."""
    for start, length, kind in chunks(data):
        content = data[start : start + length]
        if old in content:
            content = content.replace(old, new)
            checksum = zlib.crc32(content, zlib.crc32(bytes([kind])))
            data[start - HEADER.size : start + length] = HEADER.pack(checksum, length, kind) + content
    return data


def chunks(data: bytearray) -> Iterator[tuple[int, int, int]]:
    at = IDENT
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        yield at + HEADER.size, length, kind
        at += HEADER.size + length


def end(process: psutil.Popen) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()


class Taken:
    """What a process and those below it take."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._at, self._spent_s = process, time.monotonic(), 0.0

    def look(self) -> str:
        memory, spent_s = [0.0, 0.0], 0.0
        all_of_it = [self._process, *self._process.children(recursive=True)]
        for one in all_of_it:
            with suppress(psutil.Error):
                memory[one is not self._process] += one.memory_full_info().pss / 2**20
                spent_s += sum(one.cpu_times()[:2])
        share = (spent_s - self._spent_s) / (time.monotonic() - self._at)
        self._at, self._spent_s = time.monotonic(), spent_s
        return f"{memory[0]:.0f} | {memory[1]:.0f} | {len(all_of_it) - 1} | {max(0.0, share):.2f}"


def measure(ended: int, rows: int, live: int) -> None:
    with WandbServer() as server, tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        root, said = str(Path(__file__).parents[1]), undo.enter_context((Path(folder) / "said").open("w"))
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **server.environment, "PYTHONPATH": path}
        offline = {**env, "WANDB_MODE": "offline"}

        def job(*arguments: object) -> psutil.Popen:
            words = [sys.executable, "-c", JOB, *map(str, arguments)]
            started = psutil.Popen(words, cwd=folder, env=offline, stdout=said, stderr=said)
            undo.callback(end, started)
            return started

        job(FIRST, rows, 0).wait()
        (directory,) = Path(folder).glob("wandb/offline-run-*")
        for number in range(1, ended):
            copy(directory, f"run{number:05}")
        jobs = [job(f"live{number}", 10**9, 0.1) for number in range(live)]
        watcher = psutil.Popen(OWN, cwd=folder, env=env, stdout=said, stderr=said)
        undo.callback(end, watcher)
        taken, began, sent_at = Taken(watcher), time.monotonic(), 0.0
        print("seconds | rows | runs that have ended | watcher, MiB | wandb-core, MiB | wandb-cores | processors")
        while watcher.poll() is None and time.monotonic() < began + LONGEST_S:
            time.sleep(EVERY_S)
            runs = server.runs
            done = sum(run.completed for run in runs)
            at = time.monotonic() - began
            print(f"{at:.0f} | {sum(run.total for run in runs)} | {done} | {taken.look()}", flush=True)
            sent_at = sent_at or (at if done >= ended else 0.0)
            if sent_at and at > sent_at + LIVE_S:
                for one in jobs:
                    end(one)
        counts = [run.total for run in server.runs if run.id.startswith("run")]
        twice, states = sum(run.twice for run in server.runs), sorted({run.state for run in server.runs})
        print(f"exit code {watcher.poll()}; {sum(counts)} of {ended * rows} rows of ended runs arrived")
        print(f"rows of all runs that arrived twice: {twice}; states: {', '.join(states)}")


if __name__ == "__main__":
    wandb_store.RecordedRun = CountedRun  # type: ignore[misc]
    measure(*(int(word) for word in [*sys.argv[1:], *("90", "110000", "10")[len(sys.argv) - 1 :]]))
