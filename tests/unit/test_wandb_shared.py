"""The writer of a shared W&B run, when it and its followers notice something together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.offline_wandb import open_run

from flyteplugins_tracking._rank.plan import RunPlan
from flyteplugins_tracking.trackers.base import Unwatched
from flyteplugins_tracking.trackers.wandb import vendor
from flyteplugins_tracking.trackers.wandb.shared import LeaderHandle

pytest.importorskip("wandb", reason='wandb is not installed: pip install "flyteplugins-tracking[wandb]"')


@pytest.fixture
def handle(tmp_path, monkeypatch):
    run = open_run("shared", tmp_path, monkeypatch)
    config = SimpleNamespace(
        run_mode="shared",
        step_metric="global_step",
        rank_prefix=False,
        has_roles=False,
        roles=None,
        config={},
        finish_timeout_s=20,
        finish_limit="",
    )
    request = SimpleNamespace(
        config=config,
        info=None,
        watch=Unwatched(),
        plan=RunPlan(opens=True, primary=True),
        run_metadata={},
        has_other_writers=False,
    )
    handle = LeaderHandle(run, None, request)
    yield handle
    handle.finish(0)
    assert vendor.restart_service()


def test_a_run_that_is_open_again_is_not_ended_by_a_request_about_the_wandb_core_before(handle, monkeypatch):
    """This rank notices the death while it answers a follower, and opens the run in another wandb-core."""

    def dies_and_is_replaced() -> bool:
        handle._gate.mark_dead(ConnectionResetError())
        assert handle._gate.open_again()
        return True

    opened: list[object] = []
    handle._open_again = lambda *_: opened.append(handle.run) or handle.run
    monkeypatch.setattr(vendor, "service_address", lambda: "the dead one")
    monkeypatch.setattr(vendor, "has_service_died", dies_and_is_replaced)
    monkeypatch.setattr(vendor, "was_torn_down", lambda *_: False)
    monkeypatch.setattr(vendor, "share_state", lambda *_: None)
    handle._answer_request("the dead one")
    assert (handle._gate.state, len(opened)) == ("open", 1)
