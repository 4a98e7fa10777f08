"""Pluto beyond what all trackers have in common: the real client against a server that is as strict as the service."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import sys
from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import pytest
from support.pluto_server import KEY

from flyteplugins_tracking import ConfigError, tracking_init
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.outbox import AwayError, RejectedError
from flyteplugins_tracking.trackers.pluto import TRACKER, vendor


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"settings": {"_auth": "secret-key"}}, "secret="),
        ({"settings": 3}, "mapping"),
        ({"fork_run_id": 3}, "go together"),
        ({"config": "config.yaml"}, "config= as a mapping"),
        ({"download_logs": True}, "Pluto does not support download_logs=True"),
        ({"entity": "team"}, "no argument 'entity'"),
        # Ids that Pluto would misread.
        *(({"id": run_id}, run_id) for run_id in ("42", "ABC-1", "a/b")),
    ],
)
def test_unsupported_arguments_are_refused_at_decoration_with_the_reason(arguments, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        tracking_init(tracker="pluto", **arguments)
    assert "secret-key" not in str(error.value)


@pytest.mark.parametrize(("made", "run_id"), [("7-12345678", "run-7-12345678"), ("job-1a2b", "job-1a2b")])
def test_an_id_that_the_library_has_made_gets_a_word_before_it(bare_environment, made, run_id):
    def open_run(request, *_):
        raise ConfigError(request.plan.run_id)

    bare_environment.setattr("flyteplugins_tracking.trackers.client.new_id", lambda: made)
    bare_environment.setattr("flyteplugins_tracking.trackers.kept.open_or_keep", open_run)
    bare_environment.setattr("flyteplugins_tracking._runs.opening.require", lambda _: None)
    with pytest.raises(ConfigError, match=f"^{run_id}$"):
        tracking_init(tracker="pluto")(lambda: None)()


def test_a_journal_names_no_directory_but_one_of_a_clients_files(tmp_path):
    """Its files are uploaded, and it is removed."""
    folder, name = tmp_path / ".pluto", vendor.name_of_directory("train", 3, 1)
    for made in (name, name.replace("train", "train-2"), "photos"):
        (folder / made).mkdir(parents=True)
    (tmp_path / name).mkdir()
    (folder / f"{name[:-1]}g").symlink_to(tmp_path)
    (folder / "train-rank-0-attempt-0-aaaaaa").symlink_to(tmp_path)
    tried = [*(path.name for path in folder.iterdir()), "..", ".", "", f"../{name}", f"{name}/.."]
    assert [one for one in tried if vendor.is_clients_directory(f"{folder}/{one}", "train")] == [name]


@pytest.fixture
def sink(monkeypatch):
    """Pluto's sink, of run 7; and what it has posted that the service takes, by path."""
    pytest.importorskip("httpx")
    from flyteplugins_tracking.trackers.pluto.run import PlutoSanitizer
    from flyteplugins_tracking.trackers.pluto.sink import PlutoSink
    from flyteplugins_tracking.trackers.rows import Steps

    settings = SimpleNamespace(mode=None, http_proxy=None, https_proxy=None, insecure_disable_ssl=False)
    values = PlutoSanitizer("Pluto", "")
    sink = PlutoSink(SimpleNamespace(id=7, settings=settings), "x", Steps(values), values.accepted)
    sink.values, sink.posted = values, defaultdict(list)
    monkeypatch.setattr(sink, "_takes", lambda path, content: sink.posted[path].append(content) or True)
    return sink


def test_a_journal_posts_nothing_but_what_describes_its_own_run(sink):
    posts = [["status/update", {"status": "FAILED"}], ["../../x", {}], ["tags/update", {"tags": ["a"], "runId": 1}]]
    sink.send([{"call": "pluto/post", "args": args, "kwargs": {}, "id": "x"} for args in posts], None)
    assert list(sink.posted) == ["/api/runs/tags/update"]
    assert json.loads(sink.posted["/api/runs/tags/update"][0]) == {"tags": ["a"], "runId": 7}


def test_a_value_that_the_service_does_not_take_costs_no_other_value_of_a_kept_row(sink):
    row = {"n": 1, "seed": 2**70, "text": "a" * 300, "label": "a"}
    assert sink.values.clean(row) == {"n": 1, "seed": 2.0**70, "label": "a"}
    sink.send([{"row": row, "step": 1, "time": 1.0, "id": "x", "is_kept": True}], None)
    assert json.loads(sink.posted["/ingest/metrics"][0])["data"] == {"n": 1, "seed": 2.0**70}
    assert sink.posted["/ingest/data"][0].count("\n") == 1


@pytest.mark.parametrize(
    ("numbers", "bad", "error"),
    [
        ([1, 2, 3], [1, 2], RejectedError),
        ([1], [1], AwayError),  # the service has taken no row yet: it may be in trouble
        ([1, 2, 3], [1, 2, 3], AwayError),
        ([0, 1], [1], RejectedError),
    ],
)
def test_rows_are_rejected_if_the_service_takes_others_and_else_it_is_away(sink, monkeypatch, numbers, bad, error):
    """The service has the same answer to what it cannot read and to its own troubles."""
    taken: list[int] = []

    def post(path: str, content: str) -> SimpleNamespace:
        values = [json.loads(line)["data"]["a"] for line in content.splitlines()] if path == "/ingest/metrics" else []
        is_taken = not any(value in bad for value in values)
        taken.extend(values if is_taken else [])
        return SimpleNamespace(status_code=200 if is_taken else 422, text="")

    monkeypatch.delattr(sink, "_takes")
    monkeypatch.setattr(sink._service, "post", post)
    lines = [{"row": {"a": number}, "step": number, "time": 1.0, "id": "x"} for number in numbers]
    with pytest.raises(error):
        sink.send(lines, None)
    for line in lines:  # as the outbox does if they are rejected
        with contextlib.suppress(RejectedError, AwayError):
            sink.send([line], None)
    assert set(taken) == set(numbers) - set(bad)


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ({}, "https://pluto.trainy.ai"),
        ({"organization": "team", "project": "a b"}, "https://pluto.trainy.ai/o/team/projects/a%20b"),
        ({"organization": "team"}, "https://pluto.trainy.ai/o/team"),
        ({"settings": {"host": "10.0.0.1"}}, "http://10.0.0.1:3000"),
        ({"settings": {"url_app": "https://pluto.team/"}}, "https://pluto.team"),
    ],
)
def test_pages(bare_environment, arguments, address):
    assert TRACKER.page(TrackingConfig.from_arguments({"tracker": "pluto", **arguments}), None) == address


def test_a_task_of_flytekit_has_a_link():
    from flytekit import task
    from flytekit.configuration import ImageConfig, SerializationSettings
    from flytekit.tools.translator import get_serializable

    tracked = tracking_init(tracker="pluto", organization="team", project="p")
    address = "https://pluto.trainy.ai/o/team/projects/p"

    @tracked
    @task
    def of_flytekit() -> None: ...

    settings = SerializationSettings(ImageConfig.auto_default_image())
    template = get_serializable(OrderedDict(), settings, of_flytekit).template
    assert template.config == {"link_type": "tracking-pluto", "pluto_page": address}


def plain() -> None: ...


def test_a_decorated_function_is_pickled_without_a_key(monkeypatch):
    monkeypatch.setenv("PLUTO_API_KEY", KEY)
    monkeypatch.setattr(sys.modules[__name__], "plain", tracking_init(tracker="pluto", id="a")(plain))
    assert KEY.encode() not in pickle.dumps(plain)
