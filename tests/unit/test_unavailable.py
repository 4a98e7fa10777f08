"""Trackers that cannot be used, and which errors of services are outages."""

from __future__ import annotations

import pytest

from flyteplugins_tracking import TrackerUnavailableError, tracking_init
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers import Tracker
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError, may_pass
from flyteplugins_tracking.trackers.trackio.run import is_outage


class Refuses(Tracker):
    """A third party's tracker, which cannot be used."""

    name, title = "refuses", "Refuses"
    unsupported = {"offline": "it has no files"}  # noqa: RUF012

    def __init__(self, is_outage: bool) -> None:
        self._is_outage = is_outage

    def open(self, request):
        raise TrackerUnavailableError("made to fail", is_outage=self._is_outage)


@pytest.mark.parametrize("is_outage", [True, False])
def test_a_tracker_without_local_files_raises_and_refuses_that_they_are_asked_for(is_outage):
    with pytest.raises(TrackerUnavailableError, match="made to fail") as caught:
        tracking_init(tracker=Refuses(is_outage), project="p")(lambda: None)()
    assert caught.value.is_outage == is_outage
    with pytest.raises(ConfigError, match="does not support if_unavailable='degrade': it has no files"):
        tracking_init(tracker=Refuses(True), project="p", if_unavailable="degrade")(lambda: None)


def test_the_statuses_of_an_outage():
    statuses = (400, 401, 402, 403, 404, 408, 409, 422, 425, 429, 500, 503)
    assert [status for status in statuses if may_pass(status)] == [402, 408, 425, 429, 500, 503]
    assert (AwayError("x").is_outage, RejectedError("x").is_outage) == (True, False)
    assert is_outage(OSError(28, "No space left on device"))
    assert not is_outage(PermissionError(13, "Permission denied"))


def test_wandbs_errors_are_told_apart():
    wandb = pytest.importorskip("wandb")
    from flyteplugins_tracking.trackers.wandb import vendor

    outages = [
        wandb.errors.CommError("context deadline exceeded\nwhile retrying: HTTP 503: not found"),
        wandb.errors.CommError('context deadline exceeded\nwhile retrying: Post "http://x": connection refused'),
        wandb.errors.CommError("POST http://x giving up after 1 attempt(s): context deadline exceeded"),
        wandb.errors.CommError("Run initialization has timed out after 3.0 sec."),
        wandb.errors.CommError("returned error 402: quota"),
        TimeoutError("the server has not answered within 3 s"),
        ConnectionError("x"),
    ]
    refusals = [
        *(
            wandb.errors.CommError(f"Failed to upsert bucket: returned error {code}: x")
            for code in (400, 401, 403, 404)
        ),
        wandb.errors.AuthenticationError("WANDB_API_KEY invalid: API key must have 40+ characters, has 5."),
        wandb.errors.CommError("permission denied"),
    ]
    away = wandb.errors.AuthenticationError("Failed to verify credentials: the service process is busy")
    away.__cause__ = TimeoutError()
    assert [vendor.is_outage(error) for error in (*outages, away)] == [True] * 8
    assert [vendor.is_outage(error) for error in refusals] == [False] * 6
