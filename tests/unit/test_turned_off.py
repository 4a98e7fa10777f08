"""`FLYTE_TRACKING_MODE=disabled`: no rank has a run, whatever the tracker, and no tracker is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flyteplugins_tracking import (
    ConfigError,
    DistributedInfo,
    get_run,
    override_distributed_info,
    should_stop,
    tracking_init,
    tracking_run,
)
from flyteplugins_tracking._rank.plan import RUN_MODES
from flyteplugins_tracking.testing import RecordingTracker, simulate

TRACKERS = ("wandb", "pluto", "mlflow", "trackio")
# What a process says of itself: whether it has a run, and which clients it has imported.
SEEN = f"print(get_run(), sorted({{*{TRACKERS!r}}} & {{*sys.modules}}))"
DECORATED = """
import sys
from flyteplugins_tracking import get_run, tracking_init, tracking_run

def train():
    {seen}

for tracker, argument in [("wandb", dict(role="eval")), ("wandb", dict(roles=["eval"]))] + [
    (tracker, dict(id="exp-1")) for tracker in ("wandb", "pluto", "mlflow", "trackio")
]:
    tracking_init(tracker=tracker, project="p", hang_timeout_s=60, **argument)(train)()
    with tracking_run(tracker=tracker, project="p") as run:
        assert run is None
"""


@pytest.fixture
def turned_off(bare_environment: pytest.MonkeyPatch) -> None:
    bare_environment.setenv("FLYTE_TRACKING_MODE", "disabled")


@pytest.mark.parametrize("run_mode", RUN_MODES)
def test_no_rank_has_a_run(turned_off, run_mode):
    tracker = RecordingTracker()

    @tracking_init(tracker=tracker, run_mode=run_mode, pulse_s=15)
    def train(rank: int) -> int:
        assert get_run() is None
        assert not should_stop()
        with tracking_run(tracker=tracker) as inner:
            assert inner is None
        return rank

    assert train(0) == 0
    for rank in range(2):
        with override_distributed_info(DistributedInfo(rank=rank, world_size=2)):
            assert train(rank) == rank
    assert list(tracker.runs) == []


def test_no_client_is_imported_and_nothing_is_written(tmp_path):
    assert seen_by(tmp_path, "-c", DECORATED.format(seen=SEEN)) == "None []\n" * 6
    assert os.listdir(tmp_path) == []


def test_the_command_runs_the_script_without_a_run(tmp_path):
    (tmp_path / "train.py").write_text(f"import sys\nfrom flyteplugins_tracking import get_run\n{SEEN}\n")
    command = ("-m", "flyteplugins_tracking", "run", "--tracker", "trackio", "--project", "p", "train.py")
    assert seen_by(tmp_path, *command) == "None []\n"


def seen_by(directory: Path, *arguments: str) -> str:
    env = {
        **{name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV") if name in os.environ},
        **{"HOME": str(directory), "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"},
        "FLYTE_TRACKING_MODE": "disabled",
    }
    done = subprocess.run([sys.executable, *arguments], cwd=directory, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_wandb_init_of_a_script_does_nothing_and_warns_of_nothing(tmp_path):
    code = """
import importlib.util, pkgutil
from flyteplugins_tracking import tracking_init

@tracking_init
def train():
    importlib.util.find_spec("wandb"), list(pkgutil.iter_modules())  # probes are no imports
    import wandb
    run = wandb.init(project="other")
    run.log({"loss": 1})
    print(run.disabled)

train()
import wandb
print(wandb.run)
"""
    assert seen_by(tmp_path, "-c", code) == "True\nNone\n"
    assert not (tmp_path / "wandb").exists()


@pytest.mark.wide
def test_autologging_is_off_in_the_function_and_on_after_it(tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("sklearn")
    code = """
from flyteplugins_tracking import tracking_init

@tracking_init(tracker="mlflow")
def train():
    import mlflow
    from sklearn.linear_model import LinearRegression
    mlflow.sklearn.autolog(log_models=False, log_datasets=False, silent=True)
    LinearRegression().fit([[1.0], [2.0]], [1.0, 2.0])
    print(mlflow.last_active_run())

train()
from mlflow.utils import autologging_utils
print(autologging_utils._AUTOLOGGING_GLOBALLY_DISABLED)
"""
    assert seen_by(tmp_path, "-c", code) == "None\nFalse\n"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("mlruns") or name.endswith(".db")]


def test_a_test_has_its_runs_where_tracking_is_turned_off(turned_off, recorded_runs):
    train = tracking_init(run_mode="new")(lambda: get_run().log({"loss": 1}))
    train()
    assert [run.logged("loss") for run in recorded_runs] == [(1,)]
    assert len(simulate(train, num_workers=1, nproc_per_node=2).runs) == 2


def test_another_value_is_refused(bare_environment):
    tracker = RecordingTracker()
    train = tracking_init(tracker=tracker)(lambda: get_run().log({"loss": 1}))
    for mode in ("enabled", ""):
        bare_environment.setenv("FLYTE_TRACKING_MODE", mode)
        train()
    assert len(tracker.runs) == 2
    bare_environment.setenv("FLYTE_TRACKING_MODE", "disable")
    with pytest.raises(ConfigError, match=r"FLYTE_TRACKING_MODE='disable' is not one of .*did you mean 'disabled'"):
        train()
