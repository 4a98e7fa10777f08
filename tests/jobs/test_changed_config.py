"""Jobs whose arguments differ after a restart, and have the names of values that the library adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import jobs
from support.backends import BACKENDS

PROGRAM = jobs.PROGRAMS / "changed_config.py"
NAMES = ("distributed", "flyte", "restart_count", "status", "exit_code", "tags", "notes", "roles")
CHANGE = "params keep their first values, and the tags tracking_init.params.* have those of this attempt: "


# Each tracker has one of the modes, and W&B the default tier. What MLflow does with a param: `test_mlflow_jobs.py`.
@pytest.mark.sampled_full(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [("wandb", "auto"), ("wandb", "shared"), ("mlflow", "twice"), ("trackio", "auto"), ("pluto", "auto")],
)
def test_the_run_has_the_last_attempts_values(tmp_path: Path, name: str, mode: str) -> None:
    with BACKENDS[name](tmp_path) as backend:
        script = [PROGRAM, name, "p", mode]
        if mode == "twice":
            done = jobs.python(tmp_path, *script, env=backend.environment())
        else:
            agent = jobs.torchrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1")
            done = jobs.run([*agent, *map(str, script)], tmp_path, backend.environment())
        assert done.returncode == 0, done.output
        (run,) = backend.runs("p")
        assert run.status == "finished"
        if name == "mlflow":  # it keeps the first value of a param
            found = assert_params(backend)
        else:
            found = run.config
            lr = 7.0 if name == "wandb" else 0.2  # a later attempt of W&B may change any value, also twice
            assert (found["lr"], found["output_dir"], found["late"], found["item"]) == (lr, "out-1", 1, 1)
            assert (found["seed"], found["optimizer"]["beta"], found["epochs"]) == (1, 0.91, 3)
    # The arguments of the script keep their names.
    assert {key: found[key] for key in NAMES} == {key: f"own {key}" for key in NAMES}
    if mode != "twice":
        assert run.config["tracking_init"].items() >= {"world_size": 2, "restart_count": 1}.items()
    # MLflow's params that keep another value are named. The others show the new values.
    changes = [line.partition(CHANGE)[2] for line in done.output.splitlines() if CHANGE in line]
    assert "key-of-attempt" not in done.output
    text = "; ".join(changes)
    assert all(key in text for key in ("optimizer.beta", "seed", "lr", "api_key")) is (name == "mlflow")
    assert "restart_count" not in text
    assert "epochs" not in text
    assert len(changes) == (4 if name == "mlflow" else 0)
    # Inside one attempt, the client's own rule holds; of W&B, inside the first one.
    told = [json.loads((tmp_path / f"told-{attempt}").read_text()) for attempt in (0, 1)]
    refused = {"wandb": ["ConfigError", ""], "mlflow": ["MlflowException"] * 2}
    assert [one["refused"] for one in told] == refused.get(name, ["", ""])
    if name == "wandb":
        assert told[1]["config"]["lr"] == 7.0


def assert_params(backend: Any) -> dict[str, str]:
    (run,) = backend._server.runs("p")
    params: dict[str, str] = run.params
    prefix = "tracking_init.params."
    later = {key.removeprefix(prefix): value for key, value in run.tags.items() if key.startswith(prefix)}
    assert (params["lr"], later["lr"], params["seed"], later["seed"]) == ("0.1", "0.2", "0", "1")
    assert (later["optimizer.beta"], later["late"], later["item"]) == ("0.91", "1", "1")
    assert "epochs" not in later
    return params
