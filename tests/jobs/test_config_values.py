"""What each service has of a config as people have it. What the bare client makes of it: `tests/parity`."""

from __future__ import annotations

from typing import Any

import pytest
from support import jobs
from support.backends import BACKENDS
from support.config_values import ABSENT, VALUES, Case

from flyteplugins_tracking import tracking_init
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking.testing import RecordingTracker
from flyteplugins_tracking.trackers.mlflow.open import params

PROGRAM = jobs.PROGRAMS / "config_values.py"
CASES = [case for case in VALUES if case.is_there]


def differences(config: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    found = {key: config.get(key, ABSENT) for key in expected}
    return {key: (found[key], wanted) for key, wanted in expected.items() if wanted != found[key]}


@pytest.mark.sampled_full(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["wandb", "pluto", "trackio", "mlflow", "jsonl"])
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
    """What services other than W&B's have: empty mappings, and for numbers that JSON lacks their text."""
    if name == "wandb":
        return case.plain
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
