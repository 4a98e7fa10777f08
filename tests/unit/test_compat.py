"""Programs that are written for the other plugins run with another import line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.requests import RequestRecorder
from support.users import as_nobody, needs_root

from flyteplugins_tracking import ConfigError, TrackerUnavailableError, get_run
from flyteplugins_tracking.compat import wandb as compat
from flyteplugins_tracking.compat.wandb import Wandb, WandbSweep, get_wandb_context, wandb_config, wandb_init


def test_the_names_are_those_of_the_page_on_moving():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "move.md").read_text()
    table = page.partition("| The plugins | This library |\n")[2].partition("\n\n")[0]
    of_plugins = " ".join(row.split("|")[1] for row in table.splitlines())
    names = re.findall(r"`@?(\w+)(?:\(\.*\))?`", of_plugins)
    assert {*names} - {"FlyteDirectory"} == {*compat.__all__}
    assert all(hasattr(compat, name) for name in compat.__all__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "share"}, "did you mean 'shared'?"),
        ({"rank_scope": "node"}, "is not one of global, worker"),
        ({"projct": "p"}, "did you mean 'project'?"),
        ({"host": "wandb.example.com"}, "must be an address such as"),
        ({"secret": "a" * 40}, "secret must be a flytekit Secret or a callable"),
        ({"dir": "directory", "entitty": "e"}, "did you mean 'entity'?"),
    ],
)
def test_invalid_arguments_are_refused_at_decoration(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        wandb_init(**arguments)
    for kind in (Wandb, WandbSweep):  # nor is a link with it
        with pytest.raises(ConfigError):
            kind(host="wandb.example.com")


def test_arguments_that_are_none_are_left_to_the_context():
    assert wandb_init(run_mode=None, rank_scope=None, download_logs=None, project=None)(print)
    with wandb_config(project="p"), wandb_config(entity="e", run_mode=None):
        context = get_wandb_context()
    assert (context.project, context.entity, context.run_mode) == ("p", "e", "auto")


def test_a_secret_that_cannot_be_read_is_an_error_on_a_cluster_alone(bare_environment):
    @wandb_init(tracker=RequestRecorder(), secret=lambda: {}["key"])
    def train():
        return get_run().request.read_secret()

    assert train() is None  # W&B's own credentials are used
    bare_environment.setenv("FLYTE_INTERNAL_EXECUTION_ID", "execution")
    with pytest.raises(TrackerUnavailableError, match="secret= raised KeyError"):
        train()


def test_the_context_has_the_attributes_of_what_is_propagated():
    assert get_wandb_context() is None
    with wandb_config(
        project="2024", host="https://w.example", tags=["null"], config={"lr": 1e-5}, job_type="train", notes="1e5"
    ):
        context = get_wandb_context()
    assert get_wandb_context() is None
    assert dataclasses.asdict(context) == {
        "project": "2024",
        "entity": None,
        "host": "https://w.example",
        "id": None,
        "name": None,
        "tags": ["null"],
        "config": {"lr": 1e-5},
        "mode": None,
        "group": None,
        "run_mode": "auto",
        "rank_scope": "global",
        "download_logs": False,
        "kwargs": {"job_type": "train", "notes": "1e5"},
    }


def test_distributed_info_is_a_dict_or_none(bare_environment):
    def of_ranks(**torchrun: int) -> dict[str, int] | None:
        for name, value in torchrun.items():
            bare_environment.setenv(name, str(value))
        return compat.get_distributed_info()

    assert of_ranks() is None
    found = of_ranks(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=1, GROUP_WORLD_SIZE=2)
    assert json.loads(json.dumps(found)) == {
        **{"rank": 3, "local_rank": 1, "world_size": 4},
        **{"local_world_size": 2, "worker_index": 1, "num_workers": 2},
    }
    assert of_ranks(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, GROUP_RANK=0, GROUP_WORLD_SIZE=1) is None


def link(of, context=None) -> str:
    task = {"project": "proj", "domain": "dev", "parent_action_name": "a0", "action_name": "a1", "pod_name": "pod"}
    return of.get_link(run_name="run", context=context or {}, **task)


PARENT = {"FLYTE_TRACKING_RUNS": json.dumps({"wandb": {"id": "parents", "project": "p", "entity": "e"}})}

CONFIG = {"FLYTE_TRACKING_CONFIG": json.dumps({"project": "p", "entity": "e", "host": "https://w.example"})}

SWEEP = {"FLYTE_TRACKING_SWEEP_ID": json.dumps({"id": "s1", "project": "p", "entity": "e"})}


@pytest.mark.parametrize(
    ("of", "context", "address"),
    [
        (Wandb(), {}, "https://wandb.ai"),
        (Wandb(project="p"), {}, "https://wandb.ai"),
        (Wandb(project="p", entity="e"), {}, "https://wandb.ai/e/p/runs/run-a1"),
        (Wandb(project="p", entity="e", id="mine"), {}, "https://wandb.ai/e/p/runs/mine"),
        (Wandb(), CONFIG, "https://w.example/e/p/runs/run-a1"),
        (Wandb(host="https://other.example"), CONFIG, "https://other.example/e/p/runs/run-a1"),
        (Wandb(), PARENT, "https://wandb.ai/e/p/runs/parents"),
        (Wandb(run_mode="new"), {**PARENT, **CONFIG}, "https://w.example/e/p/runs/run-a1"),
        (Wandb(project="p", entity="e", run_mode="shared"), {}, "https://wandb.ai/e/p"),
        (Wandb(run_mode="shared"), PARENT, "https://wandb.ai/e/p/runs/parents"),
        (WandbSweep(), {}, "https://wandb.ai"),
        (WandbSweep(), SWEEP, "https://wandb.ai/e/p/sweeps/s1"),
        (WandbSweep(), {**CONFIG, **SWEEP}, "https://w.example/e/p/sweeps/s1"),
        (WandbSweep(id="mine"), CONFIG, "https://w.example/e/p/sweeps/mine"),
        (WandbSweep(project="p", entity="e"), {}, "https://wandb.ai/e/p/sweeps"),
    ],
)
def test_links_lead_to_the_page(of, context, address, monkeypatch):
    for name in ("WANDB_BASE_URL", "WANDB_APP_URL"):
        monkeypatch.delenv(name, raising=False)
    assert link(of, context) == address
    assert of.icon_uri == ""


class _ApiFile:
    def __init__(self, name: str) -> None:
        self.name = name

    def download(self, root: str, replace: bool) -> None:
        Path(root, self.name).write_text("from the service")


@pytest.fixture
def served(monkeypatch):
    """Have the service give these files, for each run and for those of a sweep."""

    def serve(*files: str, sweep: Sequence[str] = ()) -> None:
        run = SimpleNamespace(files=lambda: map(_ApiFile, files), summary_metrics={}, scan_history=lambda **_: [])
        of_sweep = SimpleNamespace(runs=[SimpleNamespace(id=one) for one in sweep])
        api = SimpleNamespace(run=lambda path: run, sweep=lambda path: of_sweep)
        monkeypatch.setattr("wandb.Api", lambda **_: api)

    return serve


@needs_root
def test_a_download_does_not_follow_what_another_user_has_planted(shared_tmp, served, tmp_path):
    (tmp_path / "authorized_keys").write_text("mine")

    def plant() -> None:
        for folder in ("wandb_runs", f"flyteplugins_tracking-{user}/wandb_runs"):
            (shared_tmp / folder / "r").mkdir(parents=True)
            (shared_tmp / folder / "r" / "output.log").symlink_to(tmp_path / "authorized_keys")

    user = os.geteuid()
    as_nobody(plant)
    served("output.log")
    directory = Path(compat.download_wandb_run_dir("r"))
    assert (directory / "output.log").read_text() == "from the service"
    assert (tmp_path / "authorized_keys").read_text() == "mine"


def test_an_id_or_a_file_that_is_a_path_is_refused_and_a_run_of_a_sweep_is_left_out(shared_tmp, served, tmp_path):
    served("output.log")
    for run_id in ("../../outside", "/outside", "..", "a\0b"):
        with pytest.raises(RuntimeError, match="cannot be the name of a directory"):
            compat.download_wandb_run_dir(run_id)
    assert not [*shared_tmp.rglob("output.log")]
    served("../authorized_keys")
    with pytest.raises(RuntimeError, match=r"'\.\./authorized_keys' is outside of"):
        compat.download_wandb_run_dir("r", path=str(tmp_path / "base" / "r"))
    served(sweep=("../outside", "inside"))
    assert compat.download_wandb_sweep_dirs("s", str(tmp_path / "base")) == [str(tmp_path / "base" / "inside")]
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_summary_is_not_written_through_a_link(served, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "key").write_text("mine")
    (tmp_path / "r" / "summary.json").symlink_to(tmp_path / "key")
    served()
    compat.download_wandb_run_dir("r", path=str(tmp_path / "r"))
    assert ((tmp_path / "key").read_text(), (tmp_path / "r" / "summary.json").read_text()) == ("mine", "{}")
