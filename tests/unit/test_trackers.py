"""Trackers by name, by entry point and as objects; and what they have in common, without any service."""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.backends import EXAMPLES

from flyteplugins_tracking import ConfigError, TrackerNotInstalledError, get_run, tracking_config, tracking_init
from flyteplugins_tracking._flyte.flyte2 import TrackingLink
from flyteplugins_tracking._runs import propagation
from flyteplugins_tracking._runs.context import ProcessContext, World, override
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking.trackers import registry
from flyteplugins_tracking.trackers.base import Handle, Tracker
from flyteplugins_tracking.trackers.client import ClientHandle
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.registry import find_tracker
from flyteplugins_tracking.trackers.rows import MetricSanitizer

BUILT_IN = sorted(registry.BUILT_IN)


class Noted(Handle):
    def __init__(self, request: Any) -> None:
        self.id, self.run, self.request = request.plan.run_id, self, request

    def finish(self, exit_code: int) -> None:
        pass


class Noting(Tracker):
    name = "noting"
    title = "Noting"
    arguments = frozenset({"colour"})

    def open(self, request: Any) -> Handle:
        return Noted(request)


class Eventful(ClientHandle):
    """A handle that keeps its calls in order. Its `end` waits for `may_end`."""

    def __init__(self, request: Any) -> None:
        super().__init__(request, "Noting")
        self.events: list[Any] = []
        self.ends, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def write(self, row: Any, step: Any, **_: Any) -> None:
        self.events.append(dict(row))

    def end(self, exit_code: int) -> None:
        self.ends.set()
        assert self.may_end.wait(60)
        self.events.append(exit_code)

    def resume(self) -> None:
        self.events.append("resume")


class Events(Noting):
    handle: Any = None

    def open(self, request: Any) -> Handle:
        self.handle = Eventful(request)
        return self.handle


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_missing_vendor_raises_with_the_command_that_installs_it(monkeypatch, bare_environment, name):
    tracker = find_tracker(name)
    assert tracker.name == name
    for module in [m for m in sys.modules if m.partition(".")[0] == tracker.package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(TrackerNotInstalledError, match=rf'^pip install "flyteplugins-tracking\[{name}\]"$'):
        tracking_init(tracker=name)(lambda: None)()


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_id_in_a_variable_is_checked_at_the_call(bare_environment, name):
    for variable, run_id in itertools.product(
        find_tracker(name).run_id_variables[:1], ("../../x", "a/b", "a" * 101, "\udcff")
    ):
        bare_environment.setenv(variable, run_id)
        refused = f"{variable}|id contains|does not accept in an id|it is the name of a directory"
        with pytest.raises(ConfigError, match=refused):
            tracking_init(tracker=name)(lambda: None)()


@pytest.mark.parametrize("given", [Noting(), Noting], ids=["object", "class"])
def test_a_tracker_object_can_be_passed(bare_environment, given):
    @tracking_init(tracker=given, colour="red", id="i")
    def train():
        return get_run("noting").request.config.options, get_run().id, get_run().url

    assert train() == ({"colour": "red"}, "i", None)


@pytest.mark.parametrize("given", [Noting, Noting()])
def test_the_link_of_a_tracker_object_leads_to_the_calling_tasks_run(monkeypatch, given):
    monkeypatch.setattr(Noting, "page", lambda _, config, page: f"https://noting/{page.id}")
    link = TrackingLink("Noting", TrackingConfig.from_arguments({"tracker": given}))
    runs = {propagation.RUNS: json.dumps({"noting": {"id": "the-parents"}})}
    address = link.get_link(run_name="r", context=runs, action_name="a1")
    assert address == "https://noting/the-parents"


@pytest.mark.parametrize("given", [object(), 5, None, len, logging.Logger("l")])
def test_an_object_that_is_not_a_tracker_is_refused_with_the_missing_members(given):
    if given is None:  # the default
        tracking_init(tracker="wandb")
        return
    with pytest.raises(ConfigError, match=r"must be a tracker, got a .* without .*open.*inherit from .*Tracker"):
        tracking_init(tracker=given)


@pytest.mark.parametrize(
    ("feature", "arguments"),
    [
        ("shared", {"run_mode": "shared"}),
        ("offline", {"if_unavailable": "degrade"}),
        ("config file", {"config": "config.yaml"}),
        ("download_logs", {"download_logs": True}),
    ],
)
def test_an_unsupported_feature_is_refused_with_the_reason(bare_environment, feature, arguments):
    class Lacking(Noting):
        unsupported = {feature: "its reason"}  # noqa: RUF012 as third parties write it

    with pytest.raises(ConfigError, match=r"Noting does not support .*: its reason"):
        tracking_init(tracker=Lacking, **arguments)
    tracking_init(tracker=Noting, **arguments)

    @tracking_init(tracker=Lacking, id="i")
    def train():
        return get_run().id

    with tracking_config(**arguments):
        if feature == "download_logs":  # it may be meant for another tracker of the same call
            assert train() == "i"
        else:
            with pytest.raises(ConfigError, match="its reason"):
                train()


def test_propagated_arguments_of_another_tracker_are_left_out(bare_environment):
    @tracking_init(tracker=Noting, id="i")
    def train():
        return dict(get_run().request.config.options)

    with tracking_config(entity="wandbs", project="all"):
        assert train() == {}
    with pytest.raises(ConfigError, match="has no argument 'entity'"):
        tracking_init(tracker=Noting, entity="wandbs")
    with pytest.raises(ConfigError, match="did you mean 'entity'"):
        tracking_config(entiti="nobodys")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_tracker_accepts_arguments_propagated_to_all(bare_environment, monkeypatch, name):
    monkeypatch.setattr(type(find_tracker(name)), "open", lambda _, request: Noted(request))
    monkeypatch.setattr("flyteplugins_tracking._runs.opening.require", lambda _: None)

    @tracking_init(tracker=name, id="i")
    def train():
        return get_run(name).request.config

    with tracking_config(project="p", group="g", tags=["t"], notes="n", config={"lr": 1}, entity="e", job_type="j"):
        config = train()
    assert (config.project, config.group, config.tags, config.config) == ("p", "g", ("t",), {"lr": 1})


def test_a_tracker_that_cannot_be_made_is_refused_with_the_reason(monkeypatch):
    class Wanting(Noting):
        def __init__(self, key: str) -> None:
            self.key = key

    def broken():
        raise ImportError("made to fail")

    monkeypatch.setattr(registry, "_registered", lambda: {"broken": SimpleNamespace(load=broken)})
    with pytest.raises(ConfigError, match=r"entry point 'broken' .* cannot be loaded: ImportError: made to fail"):
        tracking_init(tracker="broken")
    with pytest.raises(ConfigError, match=r"Wanting\(\) fails: .*'key'"):
        tracking_init(tracker=Wanting)
    tracking_init(tracker=Wanting("key"))


def test_a_row_that_waits_for_the_end_of_its_run_does_not_open_it_again(bare_environment):
    tracker, logging_thread = Events(), None

    @tracking_init(tracker=tracker, id="i")
    def train():
        nonlocal logging_thread
        run, handle = get_run(), tracker.handle
        handle.may_end.clear()

        def log_at_the_end():
            assert handle.ends.wait(60)
            threading.Timer(0.1, handle.may_end.set).start()
            run.log({"late": 1})

        logging_thread = threading.Thread(target=log_at_the_end)
        logging_thread.start()

    train()
    logging_thread.join(60)
    assert tracker.handle.events == [0]


def test_a_task_opens_the_callers_run_again_once_this_process_has_closed_it(bare_environment):
    tracker, order = Events(), []
    context = ProcessContext(parents={"noting": {"id": "callers"}})

    @tracking_init(tracker=tracker)
    def train(name: str) -> None:
        order.append(f"{name} opened")
        if name == "first":
            tracker.handle.may_end.clear()
            closing_time.start()

    def start_second_while_the_first_closes(first: Eventful) -> None:
        assert first.ends.wait(60)
        second.start()
        second.join(0.2)
        order.append("first closes")
        first.may_end.set()

    second = threading.Thread(target=train, args=("second",))
    closing_time = threading.Thread(target=lambda: start_second_while_the_first_closes(tracker.handle))
    world = World()
    world.adapted = lambda asked: replace(asked, context=context)
    with override(world):
        train("first")
        for thread in (closing_time, second):
            thread.join(60)
    assert order == ["first opened", "first closes", "second opened"]


def test_a_row_that_came_while_a_signal_ended_the_run_is_written_behind_its_end(bare_environment):
    tracker = Events()

    @tracking_init(tracker=tracker, id="i")
    def train():
        handle = tracker.handle
        handle.may_end.clear()
        ending = threading.Thread(target=handle.end_early, args=(143,))
        ending.start()
        assert handle.ends.wait(60)
        get_run().log({"late": 1})
        assert handle.events == []
        handle.may_end.set()
        ending.join(60)
        get_run().log({"later": 2})
        return list(handle.events)

    assert train() == [143, "resume", {"late": 1}, {"later": 2}]
    assert tracker.handle.events[4:] == [143]


def test_values_for_the_next_row_are_no_row_of_their_own_until_the_run_ends(bare_environment):
    tracker = Events()

    @tracking_init(tracker=tracker, id="i")
    def train():
        run, handle = get_run(), tracker.handle
        handle.add_to_next_row({"a": 1, "b": 1})
        handle.add_to_next_row({"b": 2, "loss": 0})
        run.log({"loss": 1}, step=7)
        run.log({"loss": 2}, step=8)
        handle.add_to_next_row({"a": 3})
        assert handle.last_step == 8

    train()
    assert tracker.handle.events == [{"b": 2, "loss": 1}, {"loss": 2}, {"a": 3}, 0]

    @tracking_init(tracker=tracker, id="i")
    def terminated():
        tracker.handle.add_to_next_row({"a": 1})
        tracker.handle.end_early(143)
        tracker.handle.add_to_next_row({"a": 2})

    terminated()
    assert tracker.handle.events == [{"a": 1}, 143]  # they open no run again


def test_values_become_numbers_or_warn_once(caplog):
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    many = numpy.array([1.0])  # the service's to take or to refuse
    for value, plain, said in (
        *((value, value, None) for value in (1, 1.5, "text", many)),
        *((value, 1, None) for value in (True, numpy.bool_(True), numpy.array(True))),
        (None, "left out", "None is left out: it is not a value"),
        *((value, math.inf, None) for value in (math.inf, numpy.float64(math.inf), torch.tensor(math.inf))),
        *((value, 0.5, None) for value in (numpy.float32(0.5), torch.tensor(0.5))),
        *((value, 3, None) for value in (numpy.int64(3), numpy.array(3), torch.tensor(3))),
    ):
        caplog.clear()
        values = MetricSanitizer("A service", "rank_1/")
        row = values.clean({"a": value})
        assert row == ({} if plain == "left out" else {"rank_1/a": plain})
        assert [type(one) for one in values.clean({"a": value}).values()] == [type(plain)] * len(row)
        assert [message.startswith(f"A service: 'a': {said}") for message in caplog.messages] == [True] * bool(said)
    assert math.isnan(values.clean({"a": math.nan})["rank_1/a"])
    for row in (None, [1], "text", {1: 2}, {"a": 1, None: 2}):
        with pytest.raises(TypeError, match="takes a mapping of strings to values"):
            values.clean(row)


def test_the_example_is_as_short_as_documented():
    assert len((EXAMPLES / "jsonl_tracker" / "jsonl_tracker.py").read_text().splitlines()) < 50
