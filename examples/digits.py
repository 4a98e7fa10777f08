"""The main job: a Flyte 1 workflow that trains a classifier of handwritten digits on 4 ranks, tracked in W&B.

`python examples/digits.py [directory] [epochs]` runs it on this machine, without a Flyte cluster, network or key, and
shows what W&B stored. The same task, registered, runs on a cluster.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path

from flytekit import task, workflow
from flytekitplugins.kfpytorch import Elastic

from flyteplugins_tracking import get_distributed_info, get_run, process_group, tracking_init

WORKERS = Elastic(nnodes=1, nproc_per_node=4, start_method="spawn", increase_shared_mem=False)
HYPERPARAMETERS = {"lr": 0.05, "batch_size": 32, "hidden": 64}


@task(task_config=WORKERS)
@tracking_init(project="digits", config=HYPERPARAMETERS)
def train(epochs: int) -> float:
    """One run for the job: on rank 0, `get_run()` is W&B's run; on ranks 1 to 3 it is None."""
    return fit(epochs)


@task(task_config=WORKERS)
@tracking_init(project="digits", run_mode="new", config=HYPERPARAMETERS)
def train_with_a_run_per_rank(epochs: int) -> float:
    """A run for every rank, in one group: for the loss of each rank's own share of the data."""
    return fit(epochs)


@workflow
def digits(epochs: int) -> tuple[float, float]:
    """Both training runs; their accuracies."""
    return train(epochs=epochs), train_with_a_run_per_rank(epochs=epochs)


def fit(epochs: int) -> float:
    """Train on this rank's share of the digits, in step with the other ranks; the accuracy on those held out."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    run, info = get_run(), get_distributed_info()
    rank, world_size = (info.rank, info.world_size) if info else (0, 1)
    torch.manual_seed(0)
    images, labels, held_out_images, held_out_labels = load_digits(rank, world_size)
    layers = (
        torch.nn.Linear(64, HYPERPARAMETERS["hidden"]),
        torch.nn.ReLU(),
        torch.nn.Linear(HYPERPARAMETERS["hidden"], 10),
    )
    accuracy = 0.0
    with process_group("gloo"):
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=HYPERPARAMETERS["lr"], momentum=0.9)
        for epoch in range(epochs):
            for batch in torch.randperm(len(images)).split(HYPERPARAMETERS["batch_size"]):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                if run is not None:
                    run.log({"loss": loss.item(), "epoch": epoch, "rank": rank})
            with torch.no_grad():
                accuracy = (model(held_out_images).argmax(1) == held_out_labels).float().mean().item()
            if rank == 0:
                name = run.id if run else "-"
                print(
                    f"{name}: epoch {epoch + 1}/{epochs}, loss {loss.item():.4f}, accuracy {accuracy:.3f}", flush=True
                )
    return accuracy


def load_digits(rank: int, world_size: int):  # type: ignore[no-untyped-def]
    """This rank's images and labels, and those held out. An equal number on each rank: DDP waits for all of them."""
    import sklearn.datasets
    import torch

    data = sklearn.datasets.load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    labels = torch.tensor(data.target)
    mine = torch.arange(rank, 1440, world_size)
    return images[mine], labels[mine], images[1440:], labels[1440:]


def main(directory: Path, epochs: int) -> None:
    """Run the workflow, and show what W&B stored."""
    from report import in_rank_order, plot, print_table
    from wandb_files import read_runs

    directory.mkdir(parents=True, exist_ok=True)
    os.environ["WANDB_DIR"] = str(directory)
    os.environ.setdefault("WANDB_SILENT", "true")
    log_offline_without_a_key(directory)
    began = time.time()
    print(
        f"A Flyte workflow on this machine: 2 training runs, each on {WORKERS.nproc_per_node} ranks that now start.",
        flush=True,
    )
    accuracies = digits(epochs=epochs)
    print(f"Done in {time.time() - began:.0f} s; accuracy {', '.join(f'{a:.3f}' for a in accuracies)}.\n")
    runs = in_rank_order([run for run in read_runs(directory / "wandb") if run.path.stat().st_mtime >= began])
    print_table(runs)
    print(f"\nLoss curves: {plot(runs, directory / 'loss.png')}")
    print(f"The same runs in W&B's terminal viewer: {wandb_command('leet', shlex.quote(str(directory / 'wandb')))}")
    print("There: the newest run comes first, space shows a run or hides it, h is help, q quits.")


def wandb_command(subcommand: str, path: str) -> str:
    """A command line for the `wandb` installed beside this Python, to be typed in the current directory."""
    program = Path(sys.executable).with_name("wandb")
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"{shlex.quote(str(program))} {subcommand} {path}"


def log_offline_without_a_key(directory: Path) -> None:
    """Set `WANDB_MODE=offline` where W&B would ask for a key, and say how to send the runs later."""
    import wandb

    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
        os.environ["WANDB_MODE"] = "offline"
        command = f"flyteplugins-tracking send {shlex.quote(str(directory / 'wandb'))}"
        print(f"No W&B API key: logging offline. To send it later: {command}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output"), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
