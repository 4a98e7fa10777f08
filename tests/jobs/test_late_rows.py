"""What W&B's client alone drops or replaces, and a decorated function keeps: late rows, and the console of attempts."""

from __future__ import annotations

import sys

import pytest
from support import jobs
from support.wandb_server import WandbServer
from support.wandb_store import RecordedRun

RUNS = jobs.PROGRAMS / "wandb_runs.py"
OWN = ("_timestamp", "_runtime")


def rows(run: RecordedRun) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if key not in OWN} for row in run.rows]


def of(run: RecordedRun, key: str, step: str = "_step") -> list[tuple[object, object]]:
    """The points of a chart of a key over a step."""
    return [(row[step], row[key]) for row in run.rows if key in row]


def drawn_over(run: RecordedRun) -> dict[str, str]:
    """The columns over which keys are drawn: see `MetricRecord` of wandb's protocol, by the numbers of its fields."""
    metrics = run.raw_config["_wandb"]["value"].get("m", [])
    by_number = {number: metric.get("1") for number, metric in enumerate(metrics, 1)}
    return {metric.get("1") or metric["2"]: by_number[metric["5"]] for metric in metrics if "5" in metric}


def test_a_row_at_a_lower_step_is_kept_with_its_step_in_a_column(tmp_path):
    with WandbServer() as server:
        done = jobs.python(tmp_path, RUNS, "late_rows", env=server.environment)
        assert done.returncode == 0, done.output
        bare, late, defined = (server.run(name) for name in ("bare-log_late", "log_late", "defined"))
        common, threads = server.run("log_late_keys"), server.run("threads")
        assert rows(server.run("log_in_order")) == rows(server.run("bare-log_in_order"))
    assert (of(bare, "val"), of(bare, "eval/a")) == ([], [(9, 9)])
    assert of(late, "val", "global_step") == [(0, 4), (1, 9)]
    assert of(late, "val") == [(4, 4), (9, 9)]
    results = [(step, step) for step in range(10)]
    assert (of(late, "eval/a", "global_step"), of(late, "eval/b", "global_step")) == (results, results)
    # The training's own rows have their steps as soon as these are above those of the late rows.
    losses = {step: loss for step, loss in of(late, "loss") if loss >= 0}
    assert list(losses.values()) == [*range(10), 10, 11, 50]
    assert [step for step in losses if step < 10] == list(range(10))
    assert of(late, "loss")[-2:] == [(50, 50), (51, -99)]
    assert of(late, "x", "_step")[-1] == (50, 50)
    assert [row["loss"] for row in late.rows if row.get("x") == row.get("loss")] == [10, 11, 50]
    # The keys that have only late rows are drawn over the column, and the function's own axes stay.
    assert drawn_over(late) == dict.fromkeys(("val", "eval/a", "eval/b"), "global_step")
    assert set(drawn_over(defined).values()) == {"epoch"}
    assert done.output.count("W&B drops such rows, so it is kept") == 4
    assert {key: [value for _, value in of(threads, key)] for key in "abcd"} == {key: [*range(25)] for key in "abcd"}
    # No row replaces a value of another one.
    pairs = [(step, 10 * step) for step in range(6)]
    assert [(row["loss"], row["global_step"]) for row in common.rows if "loss" in row] == pairs
    assert [(row["val"], row["epoch"], row["global_step"]) for row in common.rows if "val" in row] == [
        (0, 0, 0),
        (2, 2, 20),
        (4, 4, 40),
    ]


BEHIND_ITS_END = """
import os, signal, time
from flyteplugins_tracking import get_run, tracking_init
@tracking_init(project="p", id="run", kill_after_s=7)
def train():
    run = get_run()
    run.log({"loss": 0}, step=0)
    run.log({"loss": 10}, step=10)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(4)  # the run ends 2 s after the signal
    run.log({"more": 10}, step=10)
    for step in (20, 30):
        run.log({"loss": step}, step=step)
train()
"""


@pytest.mark.parametrize("mode", ["offline", pytest.param("online", marks=pytest.mark.wide)])
def test_rows_behind_the_end_of_a_run_have_their_steps(tmp_path, mode):
    """The program's handler lets the function go on. The row that was open at the end is complete."""
    (tmp_path / "script.py").write_text(BEHIND_ITS_END)
    with WandbServer() as server:
        done = jobs.run([sys.executable, "script.py"], tmp_path, {**server.environment, "WANDB_MODE": mode})
        assert done.returncode == 0, done.output
        (directory,) = (tmp_path / "wandb").glob("*run-*-run")
        jobs.python(tmp_path, "-m", "flyteplugins_tracking", "send", str(directory), env=server.environment)
        (run,) = server.runs
    assert of(run, "loss") == [(0, 0), (10, 10), (20, 20), (30, 30)]
    assert of(run, "more", "global_step") == [(10, 10)]
    assert run.exit_codes[-1] == 143  # "failed", if the second end has not had the time to mark it


@pytest.mark.wide
def test_the_console_of_each_attempt_is_kept(tmp_path):
    with WandbServer() as server:
        agent = jobs.torchrun("--standalone", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1")
        assert jobs.run([*agent, RUNS, "speaks", "restarts"], tmp_path, server.environment).returncode == 0
        for number in ("0", "1"):
            assert jobs.run([sys.executable, RUNS, "speaks", number], tmp_path, server.environment).returncode == 0
        assert len(server.runs) == 2
        for run in server.runs:
            consoles = [content.decode() for name, content in sorted(run.files.items()) if "output" in name]
            said = sorted(line[-1] for text in consoles for line in text.splitlines() if "this is attempt" in line)
            assert said == ["0", "1"]
            assert sum(name == "output.log" for name in run.files) == 1
