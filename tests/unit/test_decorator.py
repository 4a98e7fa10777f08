"""Decorated functions: their signature, errors and run, also in threads and asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.requests import RequestRecorder

from flyteplugins_tracking import (
    ConfigError,
    TrackerUnavailableError,
    get_run,
    tracking_init,
    tracking_run,
)
from flyteplugins_tracking.testing import RecordingTracker


@tracking_init
def bare(x: int, *, y: int = 2) -> int:
    """What this does."""
    return x + y


@tracking_init(project="p")
async def coroutine(x: int) -> int:
    await asyncio.sleep(0)
    return x


class Trainer:
    @tracking_init(project="p")
    def fit(self, x: int) -> tuple[str, int]:
        return type(self).__name__, x


@pytest.mark.parametrize("function", [bare, coroutine])
def test_the_function_keeps_its_name_signature_and_docstring(function):
    assert function.__module__ == __name__
    assert function.__name__ == function.__qualname__
    assert inspect.isfunction(function)
    assert next(iter(inspect.signature(function).parameters)) == "x"
    assert bare.__doc__ == "What this does."
    assert inspect.iscoroutinefunction(coroutine)
    assert not inspect.iscoroutinefunction(bare)


@pytest.mark.parametrize("function", [bare, coroutine])
def test_the_function_pickles_by_name(function):
    assert pickle.loads(pickle.dumps(function)) is function


def test_arguments_and_results_pass(recorder):
    assert bare(1, y=5) == 6
    assert asyncio.run(coroutine(3)) == 3
    assert Trainer().fit(4) == ("Trainer", 4)
    assert tracking_init(functools.partial(lambda a, b: a - b, 5))(3) == 2


def batches():
    yield 1


async def rows() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Trainer, "not the class Trainer: put it on the method that trains"),
        (7, "decorates functions and Flyte tasks, not 7"),
        (staticmethod(len), "put @tracking_init below @staticmethod"),
        (classmethod(len), "put @tracking_init below @classmethod"),
        (property(len), "put @tracking_init below @property"),
        (functools.partial(batches), "is a generator function: its body would run after the call"),
        ("project", "write @tracking_init(project='project')"),
    ],
)
def test_a_target_that_is_not_a_function_is_refused(target, message):
    with pytest.raises(ConfigError) as caught:
        tracking_init(target)
    assert message in str(caught.value)


def test_errors_pass_unchanged_and_are_the_status(recorder):
    error = ValueError("x")

    @tracking_init
    def train(raised):
        raise raised

    exits = [SystemExit(code) for code in (3, "text", None, -1, 256, True)]
    for raised in (error, *exits, KeyboardInterrupt(), StopIteration()):
        with pytest.raises(type(raised)) as caught:
            train(raised)
        assert caught.value is raised
    assert [run.exit_codes for run in recorder] == [(code,) for code in (1, 3, 1, 0, 255, 0, 1, 130, 1)]


class FailsToFinish(RecordingTracker):
    def open(self, request):
        handle = super().open(request)

        def finish(exit_code):
            raise OSError("server gone")

        handle.finish = finish
        return handle


def test_a_tracker_that_cannot_finish_does_not_fail_the_training(bare_environment, caplog):
    @tracking_init(tracker=FailsToFinish())
    def train(fails):
        if fails:
            raise ValueError("made to fail")
        return "result"

    assert train(False) == "result"
    with pytest.raises(ValueError, match="made to fail"):
        train(True)
    assert "the run could not be finished with status 0" in caplog.text


def test_get_run_is_the_run_inside_and_none_outside(recorder):
    @tracking_init
    def train():
        with ThreadPoolExecutor(1) as pool:
            return get_run(), get_run("wandb"), get_run("mlflow"), pool.submit(get_run).result()

    assert get_run() is None
    inside, named, other, in_a_thread = train()
    assert inside is named is in_a_thread
    assert [inside.id] == [run.id for run in recorder]
    assert other is None
    assert get_run() is None


def test_auto_joins_the_enclosing_run_and_new_opens_its_own(recorder):
    @tracking_init
    def joins():
        return get_run()

    @tracking_init(run_mode="new")
    def opens():
        return get_run()

    @tracking_init
    def outer():
        return get_run(), joins(), opens(), get_run()

    outer_run, joined, opened, after = outer()
    assert joined is outer_run is after
    assert opened is not outer_run
    assert [run.exit_codes for run in recorder] == [(0,), (0,)]


def test_an_id_that_is_open_is_not_opened_again(bare_environment):
    tracker = RequestRecorder()
    bare_environment.setenv("WANDB_RUN_ID", "mine")

    @tracking_init(tracker=tracker, run_mode="new")
    def inner():
        return get_run().id

    @tracking_init(tracker=tracker)
    def outer():
        return get_run().id, inner()

    first, second = outer()
    assert first == "mine"
    assert second.startswith("mine-")
    assert inner() == "mine"


def test_an_id_from_a_variable_goes_before_a_file_which_has_it_from_then_on(bare_environment, tmp_path):
    @tracking_init(tracker=RequestRecorder(), run_file=tmp_path / "run.json")
    def train():
        (kept,) = (path for path in tmp_path.glob("run.json*") if path.suffix != ".lock")
        return get_run().id, json.loads(kept.read_text())["base_id"]

    bare_environment.setenv("WANDB_RUN_ID", "yesterday")
    assert train() == ("yesterday", "yesterday")


def test_trainings_of_several_threads_have_their_runs_and_a_helper_thread_none_of_another(recorder):
    together = threading.Barrier(2, timeout=60)

    @tracking_init
    def train():
        with ThreadPoolExecutor(1) as pool:
            together.wait()
            without = pool.submit(get_run).result()
            within = pool.submit(contextvars.copy_context().run, get_run).result()
            together.wait()
            return get_run(), without, within

    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(train), pool.submit(train)]]
    for run, without, within in found:
        assert without is None
        assert within is run is not None
    assert found[0][0] is not found[1][0]
    assert get_run() is None


@pytest.mark.parametrize("secret", [lambda: 7, lambda: {"key": "canary"}, lambda: 1 / 0])
def test_a_secret_that_is_not_text_is_reported_and_not_shown(bare_environment, secret):
    @tracking_init(tracker=RequestRecorder(), secret=secret)
    def train():
        with pytest.raises(
            TrackerUnavailableError, match=r"secret= (must return the API key as a string, got|raised Zero)"
        ) as caught:
            get_run().request.read_secret()
        assert "canary" not in str(caught.value)
        assert caught.value.__cause__ is None

    train()


def test_trainings_in_several_tasks_at_once_see_their_own_runs(recorder):
    entered = []

    @tracking_init
    async def train():
        before = get_run()
        entered.append(before)
        while len(entered) < 2:
            await asyncio.sleep(0)
        return before, get_run()

    async def both():
        return await asyncio.gather(train(), train())

    (first, first_after), (second, second_after) = asyncio.run(both())
    assert first is first_after is not second
    assert second is second_after


def test_the_environment_is_read_at_entry_only(recorder, bare_environment):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        bare_environment.setenv(name, value)

    @tracking_init
    def train():
        bare_environment.setenv("RANK", "nonsense")  # Lightning deletes WORLD_SIZE
        return get_run()

    run_id = train().id
    assert [(run.id, run.exit_codes) for run in recorder] == [(run_id, (0,))]


async def body() -> None:
    """Never runs."""


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (body, "coroutine"),
        (batches, "generator"),
        (rows, "async generator"),
        (contextlib.contextmanager(batches), "generator"),
        (contextlib.asynccontextmanager(rows), "async generator"),
    ],
)
def test_a_function_that_returns_a_body_instead_of_running_it_is_refused(recorder, made, kind):
    @tracking_init
    def train() -> Any:
        return made()

    with pytest.raises(ConfigError, match=f"train returned a {kind} that has not started"):
        train()
    assert [run.exit_codes for run in recorder] == [(1,)]


class MuteError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_leaves_the_function_as_it_is(recorder):
    error = MuteError()

    @tracking_init
    def train() -> None:
        raise error from MuteError()

    with pytest.raises(MuteError) as caught:
        train()
    assert caught.value is error
    assert [run.exit_codes for run in recorder] == [(1,)]


def test_a_block_is_for_one_time_and_its_generator_says_if_it_is_left(caplog):
    tracker = RecordingTracker()
    block = tracking_run(tracker=tracker, id="i")

    def steps() -> Iterator[int]:
        with block:
            yield 1

    left = steps()
    next(left)
    left.close()
    assert [run.exit_code for run in tracker.runs] == [1]
    assert "the generator with this block was closed before its end" in caplog.text
    with pytest.raises(ConfigError, match="has had its block"):
        next(steps())
