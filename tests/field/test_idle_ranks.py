"""Scripts whose ranks all open a run, or log from a rank without one: what does nothing, and who says so."""

from __future__ import annotations

import re

import pytest
from support import jobs
from support.backends import BACKENDS

LAUNCHER = ("--standalone", "--nproc-per-node=2", "--monitor-interval=0.1")
UNDER = ("-m", "flyteplugins_tracking", "run", "--project", "theirs")
NOTHING = "rank 1 logs to a run that does nothing, and what it logs is lost: rank 0 has the run."
AT_THE_END = "does not have the rows that rank 1 has logged: pass primary_rank=1 to tracking_init"

LOGGING = {
    "mlflow": """
import mlflow
with mlflow.start_run(run_name="n") as run:
    mlflow.log_params({"lr": 1})
    mlflow.log_text("a text", "a.txt")
    for x in range(3):
        mlflow.log_metric("rank", x, step=x)
    values = mlflow.get_run(run.info.run_id).data.params
    if RANK:
        with mlflow.start_run(nested=True):
            mlflow.log_metric("rank", 9)
assert mlflow.active_run() is None or not RANK
""",
    "trackio": """
import trackio
run = trackio.init("theirs", name="n", config={"lr": 1})
for x in range(3):
    (trackio if x else run).log({"rank": x})
values = trackio.config
trackio.finish()
""",
    "pluto": """
import pluto
run = pluto.init(project="theirs", name="n", config={"lr": 1})
for x in range(3):
    (pluto if x else run).log({"rank": x})
run.add_tags(["a"])
values = run.config
run.finish()
""",
}
DECORATED = """
import os
from flyteplugins_tracking import tracking_init
RANK = int(os.environ["RANK"])
@tracking_init(project="theirs", tracker={tracker!r})
def train():
    exec({code!r}, globals())
train()
"""


@pytest.mark.full
@pytest.mark.parametrize("tracker", LOGGING)
@pytest.mark.parametrize("form", ["run", pytest.param("decorator", marks=pytest.mark.wide)])
def test_the_opening_of_a_rank_without_a_run_does_nothing(tmp_path, tracker, form):
    is_run = form == "run"
    code = f"{LOGGING[tracker]}print('values', {{**values}}.get('lr'))\n"
    prefix = 'import os\nRANK = int(os.environ["RANK"])\n'
    (tmp_path / "script.py").write_text(prefix + code if is_run else DECORATED.format(tracker=tracker, code=code))
    command = [*UNDER, "--tracker", tracker] if is_run else []
    with BACKENDS[tracker](tmp_path) as backend:
        done = jobs.run([*jobs.torchrun(*LAUNCHER), *command, "script.py"], tmp_path, backend.environment())
        assert done.returncode == 0, done.output
        (run,) = backend.runs("theirs")
    assert (run.points, run.status) == ({("rank", x): 1 for x in range(3)}, "finished"), done.output
    assert sorted(re.findall("values (.*)", done.output)) == (["1", "None"] if tracker == "mlflow" else ["1", "1"])
    assert (done.output.count(NOTHING), AT_THE_END in done.output) == (1, False), done.output


LOGS_ON = """
import os, pathlib, sys, time, wandb
from flyteplugins_tracking import tracking_init
@tracking_init(project="p", primary_rank=int(sys.argv[2]))
def train():
    run = wandb.init()
    if os.environ["RANK"] in sys.argv[1]:
        run.log({"x": 1})
    elif os.environ["RANK"] == "0":
        run.summary["best"] = 1
    pathlib.Path(os.environ["RANK"]).touch()
    while not pathlib.Path("1").exists():
        time.sleep(0.01)
train()
"""


@pytest.mark.parametrize(
    ("ranks", "primary", "first", "end"),
    [
        ("1", "0", 1, True),
        pytest.param("01", "0", 1, False, marks=pytest.mark.full),
        pytest.param("", "0", 0, False, marks=pytest.mark.full),  # an evaluation without rows
        pytest.param("1", "1", 0, False, marks=pytest.mark.full),
    ],
)
def test_the_rank_with_a_run_without_rows_says_which_rank_has_logged(tmp_path, ranks, primary, first, end):
    (tmp_path / "script.py").write_text(LOGS_ON)
    done = jobs.run([*jobs.torchrun(*LAUNCHER), "script.py", ranks, primary], tmp_path)
    (run,) = done.runs
    assert (done.returncode, len(run.rows)) == (0, int(primary in ranks)), done.output
    assert (done.output.count(NOTHING), AT_THE_END in done.output) == (first, end), done.output
