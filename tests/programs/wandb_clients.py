"""W&B's own client without the library, for `test_wandb_server.py`. Arguments: a function's name, and its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb


def everything() -> None:
    """Log all that belongs to a run."""
    identity = {"entity": "e", "project": "p", "id": "i", "group": "g", "name": "n", "tags": ["t"], "notes": "no"}
    run = wandb.init(**identity, job_type="j", config={"a": {"b": 1}})
    run.define_metric("x", summary="max")
    run.config.update({"late": 2})
    for x in (1, 3, 2):
        run.log({"x": x})
    run.log({"table": wandb.Table(columns=["c"], data=[[1]])})
    run.log_artifact(wandb.Artifact("model-of-i", "model"))
    print("on the console")
    run.alert("title", "text")
    run.finish()


def attempt(number: str, resume: str = "") -> None:
    """Log three rows that tell the attempt, and exit with its number."""
    run = wandb.init(project="p", id="r", resume=resume or None, config={number: 1})
    for x in range(3):
        run.log({"x": int(number) * 10 + x})
    run.finish(exit_code=int(number))  # wandb's own exit hook has hung here once
    sys.exit(int(number))


def shared_writer(number: str) -> None:
    """Log 50 rows. Writer 1 is the primary of a shared run, 2 another of its writers, 0 one that is not shared."""
    settings = wandb.Settings(
        mode="shared", x_label="writer", x_primary=number == "1", x_update_finish_state=number == "1"
    )
    run = wandb.init(project="p", id="r", settings=settings if number != "0" else None)
    for x in range(50):
        run.log({"x": int(number) * 100 + x})
    run.finish()


def preempted(exit_code: str) -> None:
    """Mark the run as preempting, and finish it when the file `stop` is there."""
    run = wandb.init(project="p", id="r")
    run.log({"x": 1})
    run.mark_preempting()
    while not Path("stop").exists():
        time.sleep(0.01)
    run.finish(exit_code=int(exit_code))


def compressed() -> None:
    run = wandb.init(project="p", id="r", settings=wandb.Settings(x_file_stream_no_gzip=False))
    for x in range(20_000):
        run.log({"x": x})
    run.finish()


def make_sweep(*x: int) -> str:
    """A sweep over these values, whose agents ask for work without a pause."""
    from wandb.agents.pyagent import Agent

    Agent.HEARTBEAT_SLEEP_SECONDS = 0.1
    parameters = {"x": {"values": [*x]}, "y": {"values": [3]}, "lr": {"min": 0.5, "max": 1.0}, "c": {"value": 7}}
    return str(wandb.sweep({"method": "grid", "parameters": parameters}, project="p", entity="e"))


def trial() -> None:
    run = wandb.init(config={"x": 0, "own": True})
    run.log({"product": run.config.x * run.config.y})


def agent(sweep_id: str, function: Callable[[], None] = trial, **options: Any) -> None:
    wandb.agent(sweep_id, function, project="p", entity="e", **options)


def agents() -> None:
    """A sweep of three trials: one agent runs the first, the next one the others, and a third is refused."""
    sweep_id = make_sweep(1, 2, 4)
    agent(sweep_id, count=1)
    agent(sweep_id)
    print_refusal(lambda: agent(sweep_id))


def wrong_sweeps() -> None:
    """An agent of a sweep that does not exist, and a sweep without a method."""
    print_refusal(lambda: agent("nobody", lambda: None))
    print_refusal(lambda: wandb.sweep({"parameters": {}}, project="p", entity="e"))


def print_refusal(attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except wandb.Error as error:
        print("REFUSED", error)


def reads_back() -> None:
    """Record a sweep, a run and a file, and write what the API reads of them to `read.json`."""
    sweep_id = make_sweep(1, 2)
    agent(sweep_id, count=2)
    record_run()
    api = wandb.Api()
    run, sweep = api.run("e/p/r"), api.sweep(f"e/p/{sweep_id}")
    for file in run.files():
        file.download(root="read", replace=True)
    read = {
        "run": [run.id, run.state, run.group, run.config, run.summary["x"], run.lastHistoryStep],
        "history": [row["x"] for row in run.history(pandas=False)],
        "sampled": len(run.history(samples=10, pandas=False)),
        "keys": run.history(keys=["z"], pandas=False),
        "scanned": [row["x"] for row in run.scan_history(page_size=7)],
        "file": run.file("a note.txt").size,
        "pattern": [file.name for file in run.files(pattern="% note.t_t")],
        "sweep": [sweep.id, sweep.state, sweep.expected_run_count, len(sweep.runs)],
        "trials": [[trial.id, trial.config["x"], trial.sweep_name] for trial in sweep.runs],
        "group": [run.id for run in api.runs("e/p", filters={"group": "g"}, per_page=1)],
        "pages": [run.id for run in api.runs("e/p", order="-created_at", per_page=1)],
    }
    Path("read.json").write_text(json.dumps(read))


def record_run() -> None:
    run = wandb.init(entity="e", project="p", id="r", group="g", config={"a": {"b": 1}})
    for x in range(30):
        run.log({"x": x, **({"z": -x} if x == 5 else {})})
    Path("a note.txt").write_text("kept")
    run.save("a note.txt", policy="end")
    run.finish()


def reads_nothing() -> None:
    """Read runs, a project, a sweep and a file that do not exist."""
    import requests

    api = wandb.Api()
    reads: list[Callable[[], object]] = [
        lambda: api.run("e/p/nobody"),
        lambda: api.run("e/none/r"),
        lambda: api.sweep("e/p/nobody"),
        lambda: list(api.runs("e/none")),
    ]
    for read in reads:
        try:
            print("FOUND", read())
        except Exception as error:
            print(type(error).__name__, error)
    url, auth = os.environ["WANDB_BASE_URL"] + "/files/e/p/r/none", ("api", os.environ["WANDB_API_KEY"])
    print("STATUS", requests.get(url, auth=auth).status_code, requests.get(url).status_code)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
