"""What each service has of a config as people have it: with the bare client of W&B, and with each tracker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import jobs
from support.backends import BACKENDS
from support.config_values import ABSENT, ENDLESS, VALUES, Case
from support.wandb_server import WandbServer

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.mlflow.open import params

PROGRAM = jobs.PROGRAMS / "config_values.py"
CASES = [case for case in VALUES if case.is_there]


def differences(config: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    found = {key: config.get(key, ABSENT) for key in expected}
    return {key: (found[key], wanted) for key, wanted in expected.items() if wanted != found[key]}


@pytest.fixture(scope="module")
def wandb_configs(tmp_path_factory):
    """The configs of a run of the bare client and of one of ours, on one server; and what the bare client refuses."""
    directory = tmp_path_factory.mktemp("wandb")
    with WandbServer() as server:
        for program in ("bare", "wandb"):
            done = jobs.python(directory, PROGRAM, program, program, env=server.environment)
            assert done.returncode == 0, done.output
        refused = json.loads((directory / "refused").read_text())
        configs = {run.project: run.config for run in server.runs}
    return {**configs["bare"], **refused}, configs["wandb"]


@pytest.mark.full
def test_the_table_says_what_the_bare_client_does(wandb_configs):
    bare, _ = wandb_configs
    assert differences(bare, {case.key: case.bare for case in CASES if case.bare != ENDLESS}) == {}


@pytest.mark.full
def test_wandb_has_what_the_bare_client_has_or_better(wandb_configs):
    _, ours = wandb_configs
    assert differences(ours, {case.key: case.plain for case in CASES}) == {}
    assert len(CASES) > 90
    assert not [case.name for case in CASES if case.bare != case.plain and not case.why]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    ["trackio", pytest.param("mlflow", marks=pytest.mark.full), "pluto", pytest.param("jsonl", marks=pytest.mark.full)],
)
def test_each_tracker_takes_each_value(name, tmp_path):
    with BACKENDS[name](tmp_path) as backend:
        done = jobs.python(tmp_path, PROGRAM, name, "p", env=backend.environment())
        assert done.returncode == 0, done.output
        (run,) = backend.runs("p")
        assert run.status == "finished"
        if name == "mlflow":
            assert_params(backend)
            return
    assert differences(run.config, {case.key: as_text(case, name) for case in CASES}) == {}


def as_text(case: Case, name: str) -> Any:
    """What these services have: empty mappings, and for numbers that JSON lacks their text."""
    texts = {"NaN": "NaN", "infinity": "Infinity"} if name in ("trackio", "pluto") else {}
    return {"empty mapping": {}, "NaN": pytest.approx(float("nan"), nan_ok=True), **texts}.get(case.name, case.plain)


def assert_params(backend: Any) -> None:
    (run,) = backend._server.runs("p")
    expected = params(plain_config({case.key: case.make() for case in CASES}))
    wanted = {key: text for key, text in expected.items() if len(key) <= 250 and "," not in key}
    assert {key: run.params.get(key) for key in wanted} == wanted
    assert len(wanted) > len(CASES)


def test_the_recording_has_each_value():
    recorder = RecordingTracker()
    tracking_init(tracker=recorder, config={case.key: case.make() for case in CASES})(lambda: None)()
    assert differences(dict(recorder.runs[0].config), {case.key: as_text(case, "recording") for case in CASES}) == {}
