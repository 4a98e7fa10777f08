"""A training that does what its argument, a JSON object, says, and reports what this rank saw.

Keys: `tracking`: the decorator's arguments; `trackings`: those of several trainings, one after the other. `rows`: how
many to log. `end`: {rank: how it ends}, with "raise", "interrupt" or an exit code; `fail_attempts`: `end` holds for the
attempts below it; `linger_s`: how long the others stay, where no later attempt comes. `process_group`: whether to
initialise one before. `calls`: how often the function is called.
"""

import json
import os
import sys
import time
from pathlib import Path

from flyteplugins_tracking import get_distributed_info, get_run, tracking_init
from flyteplugins_tracking._util import proc

env = os.environ.get
SETTINGS = json.loads(sys.argv[-1])
ATTEMPT = int(env("TORCHELASTIC_RESTART_COUNT", "0"))
REPORTS = Path(os.environ["TRAIN_DIR"], "reports")


def training(project: str, rows: int) -> None:
    run, info = get_run(), get_distributed_info()
    for row in range(rows):
        if run is not None:
            run.log({"row": row, "attempt": ATTEMPT})
    report(run, info, project)
    if SETTINGS.get("fail_attempts", 1) > ATTEMPT:
        how = SETTINGS.get("end", {}).get(str(info.rank if info else 0))
        if how is not None:
            wait_for_the_node()
            end(how)
        linger(SETTINGS.get("linger_s", 0))


def end(how: object) -> None:
    if how == "raise":
        raise ValueError("made to fail")
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit(how)


def wait_for_the_node() -> None:
    """Wait until each rank of this node has logged its rows: the agent ends the others as soon as one has failed."""
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list(REPORTS.glob(f"{marker()}-*"))) < int(env("LOCAL_WORLD_SIZE", "1")):
        time.sleep(0.02)


def marker() -> str:
    return f"rows-of-attempt-{ATTEMPT}-node-{env('GROUP_RANK', '0')}"


def linger(seconds: float) -> None:
    """An agent that restarts its workers with those of another node does not count that: they are told here."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not Path(REPORTS, f"attempt-{ATTEMPT + 1}").exists():
        time.sleep(0.1)


def report(run: object, info: object, project: str) -> None:
    REPORTS.mkdir(exist_ok=True)
    seen = {
        "rank": info.rank if info else None,
        "local_rank": info.local_rank if info else None,
        "worker_index": info.worker_index if info else None,
        "num_workers": info.num_workers if info else None,
        "world_size": info.world_size if info else None,
        "launcher": info.launcher if info else None,
        "restart_count": ATTEMPT,
        "project": project,
        "run_id": run.id if run else None,
        "wandb_loaded": "wandb" in sys.modules,
        "torch_loaded": "torch" in sys.modules,
        "children": [" ".join(proc.command_line(pid)) for pid in proc.children(os.getpid())],
        "argv": sys.argv[1:-1],
    }
    Path(REPORTS, f"{os.getpid()}-{len(list(REPORTS.iterdir()))}.json").write_text(json.dumps(seen))
    Path(REPORTS, f"attempt-{ATTEMPT}").touch()
    Path(REPORTS, f"{marker()}-{env('LOCAL_RANK', '0')}").touch()


def join_process_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # a rank that ends while another one still connects makes that one fail


if __name__ == "__main__":
    if SETTINGS.get("process_group"):
        join_process_group()
    for tracking in SETTINGS.get("trackings", [SETTINGS.get("tracking", {})]):
        tracking = {"project": "tests", **tracking}
        train = tracking_init(**tracking)(training)
        for _ in range(SETTINGS.get("calls", 1)):
            train(tracking["project"], SETTINGS.get("rows", 3))
