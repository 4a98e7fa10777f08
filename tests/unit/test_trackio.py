"""The real Trackio client on its own files and on its own server: what it is given and what it stored."""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import threading
import time

import pytest

from flyteplugins_tracking import ConfigError, tracking_init
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig
from flyteplugins_tracking.trackers.outbox import AwayError
from flyteplugins_tracking.trackers.trackio import INIT_ARGUMENTS, TRACKER

TOKEN = "canary" + "0" * 34


def test_the_decorator_takes_every_argument_of_trackio_init():
    import trackio

    by_name, ignored = {"project", "group", "name", "config"}, {"settings"}
    assert by_name <= OWN_ARGUMENTS
    assert set(inspect.signature(trackio.init).parameters) == INIT_ARGUMENTS | by_name | ignored


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"resume": "never"}, "another id="),
        ({"resume": "must"}, "another id="),
        ({"embed": True}, "trackio show"),
        ({"space_id": "me/space"}, "trackio sync"),
        ({"bucket_id": "me/bucket"}, "trackio sync"),
        ({"settings": {}}, "has no argument 'settings'"),
        ({"entity": "e"}, "has no argument 'entity'"),
        ({"server_ur": "http://h"}, "did you mean 'server_url'"),
        ({"server_url": "example.com"}, "must be an address"),
        ({"server_url": 5}, "must be an address"),
        ({"server_url": f"http://h/?write_token={TOKEN}"}, "holds a token"),
        ({"server_url": f"http://me:{TOKEN}@h/"}, "holds a token"),
        ({"config": {"_lr": 1}}, "'_lr', and Trackio itself uses those"),
        ({"config": "config.yaml"}, "trackio.init reads none"),
        ({"download_logs": True}, "the whole project"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_decoration(arguments, reason):
    with pytest.raises(ConfigError) as refused:
        tracking_init(tracker="trackio", **arguments)
    assert reason in str(refused.value)
    assert TOKEN not in str(refused.value)


def test_a_project_that_trackio_refuses_is_refused_when_the_run_is_opened(bare_environment, tmp_path):
    bare_environment.setenv("TRACKIO_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="'model_system' is not allowed"):
        tracking_init(tracker="trackio", project="model_system")(lambda: None)()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "variable", "page", "address"),
    [
        ({"project": "p"}, None, Page("run", "r"), None),
        (
            {"project": "p"},
            f"http://h:1/?write_token={TOKEN}",
            Page("run", "r 1"),
            "http://h:1/?project=p&run_ids=r%201",
        ),
        ({"project": "p", "server_url": "http://h/"}, "http://o", Page("group", "g"), "http://h/?project=p"),
        ({"project": "p", "server_url": "http://h"}, None, None, "http://h/?project=p"),
        ({"server_url": "http://h/base/"}, None, Page("run", "r"), "http://h/base"),
        (
            {"project": "p", "server_url": "http://h"},
            None,
            Page("run", "{{.runName}}-a0"),
            "http://h/?project=p&run_ids={{.runName}}-a0",
        ),
    ],
)
def test_links_lead_to_the_server_if_there_is_one(monkeypatch, arguments, variable, page, address):
    monkeypatch.delenv("TRACKIO_SERVER_URL", raising=False)
    if variable:
        monkeypatch.setenv("TRACKIO_SERVER_URL", variable)
    wanted = TrackingConfig.from_arguments({"tracker": "trackio", **arguments})
    assert TRACKER.page(wanted, page) == address
    assert TOKEN not in json.dumps(dict(TRACKER.link(wanted, None)))


def test_an_answer_that_drips_is_an_outage_in_time():
    """The client's own limit is for each part of an answer."""
    pytest.importorskip("httpx")
    from flyteplugins_tracking.trackers.trackio.open import _client

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not is_over.wait(0.1):
                    connection.sendall(b" ")

        threading.Thread(target=drip, daemon=True).start()
        try:
            with pytest.raises(AwayError, match="does not answer: not within") as caught:
                _client(f"http://127.0.0.1:{listener.getsockname()[1]}", "token", time.monotonic() + 2)
        finally:
            is_over.set()
    assert caught.value.is_outage
