"""Ranks that an engine or a script starts, for `tests/engines`. The argument says how; the second is a free port.

What a rank saw is written to seen-{rank}.json in TRAIN_DIR, by the engine's own rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

RANKS = 2


def body(rank: int, world_size: int) -> None:
    """`rank` and `world_size` are the engine's own."""
    run, info = get_run(), get_distributed_info()
    for step in range(3):
        if run is not None:
            run.log({"rank": rank, "step": step})
    see(rank, world_size, info=None if info is None else dict(info), id=getattr(run, "id", None))


train = tracking_init(project="ranks")(body)
train_on_workers = tracking_init(project="ranks", rank_scope="worker")(body)


def see(rank: int, world_size: int, **what: Any) -> None:
    path = Path(os.environ["TRAIN_DIR"], f"seen-{rank}.json")
    path.write_text(json.dumps({"truth": [rank, world_size], **what}))


def accelerate() -> None:
    """Under `accelerate launch`: the state is made first, as most scripts do."""
    from accelerate import PartialState

    state = PartialState(cpu=True)
    state.wait_for_everyone()  # a rank that ends while the other one still connects makes that one fail
    train(state.process_index, state.num_processes)
    dist.destroy_process_group()


def debug() -> None:
    from accelerate import debug_launcher

    debug_launcher(_in_group, num_processes=RANKS)


def _in_group() -> None:
    train(dist.get_rank(), dist.get_world_size())


def notebook() -> None:
    from accelerate import notebook_launcher

    notebook_launcher(_by_variables, num_processes=RANKS, use_port=sys.argv[2])


def _by_variables() -> None:
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def fabric() -> None:
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    engine.launch()
    train(engine.global_rank, engine.world_size)


def deepspeed() -> None:
    train_on_workers(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def deepspeed_peer_fails() -> None:
    """Rank 1 fails when rank 0 has logged some rows. Rank 0 notes each one that it has logged."""
    logged = Path(os.environ["TRAIN_DIR"], "logged")

    @tracking_init(project="ranks")
    def training() -> None:
        run, x = get_run(), 0
        if run is None:
            while not logged.exists() or int(logged.read_text() or 0) < 100:
                time.sleep(0.05)
            raise ValueError("made to fail")
        while True:
            run.log({"x": x})
            unfinished = logged.with_suffix(".tmp")
            unfinished.write_text(str(x))
            unfinished.replace(logged)
            x += 1
            time.sleep(0.01)

    training()


def spark() -> None:
    """Spark's TorchDistributor, whose tasks each start a torchrun of one process."""
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    with SparkSession.builder.master(f"local[{RANKS}]").getOrCreate():
        TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False).run(_by_variables)


def spawn() -> None:
    """`mp.spawn`: each process sets its variables itself."""
    mp.spawn(_with_late_variables, nprocs=RANKS)


def _with_late_variables(index: int) -> None:
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(RANKS))
    train(index, RANKS)


def spawn_same() -> None:
    """A notebook has set the variables of one process for all that it starts."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(RANKS))
    mp.spawn(_as_rank_0, args=(mp.get_context("spawn").Barrier(RANKS),), nprocs=RANKS)


def _as_rank_0(index: int, together: Any) -> None:
    @tracking_init(project="ranks", id="same")
    def train_until_all_have_called() -> str:
        together.wait()
        get_run().log({"pid": os.getpid()})
        return str(get_run().id)

    see(index, RANKS, id=train_until_all_have_called(), pid=os.getpid())


def spawn_group_inside() -> None:
    """The function makes and leaves the group, as a script does that had `wandb.init` below `if rank == 0:`."""
    mp.spawn(_group_inside, args=(sys.argv[2],), nprocs=RANKS)


@tracking_init(project="ranks")
def _group_inside(index: int, port: str) -> None:
    get_run().log({"before": index})
    _connect(index, port)
    for step in range(2):
        get_run().log({"rank": index, "step": step})
    dist.destroy_process_group()


def _connect(index: int, port: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=RANKS)
    dist.barrier()  # a rank that ends while the other one still connects makes that one fail


def spawn_group_outside() -> None:
    """The way that docs/guides/move.md shows."""
    mp.spawn(_group_outside, args=(sys.argv[2],), nprocs=RANKS)


def _group_outside(index: int, port: str) -> None:
    _connect(index, port)
    train(index, RANKS)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
