"""The arguments of `tracking_config` reach the functions and tasks of its block unchanged, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.config_values import VALUES, stored
from support.requests import RequestRecorder

from flyteplugins_tracking import ConfigError, get_run, tracking_config, tracking_init
from flyteplugins_tracking._runs.propagation import CONFIG, read

TRACKER = RequestRecorder()


@tracking_init(tracker=TRACKER)
def train():
    return get_run().request.config


@given(
    st.dictionaries(
        st.sampled_from(["project", "name", "entity", "group", "notes"]),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/\\#?%:"), min_size=1).filter(str.strip),
    )
)
def test_every_text_comes_back_as_it_was(values):
    with tracking_config(**values):
        assert read(CONFIG, None) == values
        assert read(CONFIG, tracking_config(**values)) == values


def test_the_decorator_takes_precedence_over_blocks_these_over_the_variable_and_that_over_the_defaults(
    bare_environment, monkeypatch
):
    monkeypatch.setenv(
        CONFIG, json.dumps({"project": "variable", "group": "variable", "run_mode": "new", "tags": ["v"]})
    )

    @tracking_init(tracker=TRACKER, project="decorator", config={"lr": 2}, run_mode="auto")
    def decorated():
        return get_run().request.config

    inner = tracking_config(project="inner", config={"depth": 2})
    with tracking_config(project="outer", group="outer", config={"lr": 1, "depth": 1}, notes=None), inner:
        config = decorated()
    assert (config.project, config.group, config.tags, config.run_mode) == ("decorator", "outer", ("v",), "auto")
    assert config.config == {"lr": 2, "depth": 2}
    assert (train().project, train().run_mode, train().rank_scope) == ("variable", "new", "global")


def test_a_block_has_no_effect_after_its_end(bare_environment):
    before = dict(os.environ)
    with pytest.raises(ValueError, match="made to fail"), tracking_config(project="block"):
        raise ValueError("made to fail")
    assert (train().project, dict(os.environ)) == (None, before)


def test_malformed_configuration_is_refused_and_nothing_is_opened(bare_environment, monkeypatch):
    before, malformed = len(TRACKER.runs), f"the variable {CONFIG} (is not valid JSON|must be a JSON object)"
    invalid = {'{"run_mode": "shard"}': "did you mean 'shared'", '{"projct": "p"}': "did you mean 'project'"}
    for text, message in {**dict.fromkeys(("no json", "[1]", "null", '"text"'), malformed), **invalid}.items():
        monkeypatch.setenv(CONFIG, text)
        with pytest.raises(ConfigError, match=message):
            train()
    assert len(TRACKER.runs) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "shard"}, "did you mean 'shared'"),
        ({"projct": "p"}, "did you mean 'project'"),
        ({"primary_rank": lambda _: 0}, "primary_rank= is a callable, which cannot be propagated as text"),
        ({"primary_rank": "3"}, "primary_rank must be an int"),
        ({"secret": lambda: "key"}, "secret= is read where the run is opened"),
        ({"settings": {"api_key": "key"}}, "settings= must not hold an API key"),
        ({"settings": {"x": object()}}, "tracking_config cannot reach other processes"),
    ],
)
def test_a_value_that_cannot_be_propagated_is_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tracking_config(**arguments)


def test_each_kind_of_value_in_a_config_reaches_other_processes(monkeypatch):
    config = {case.key: case.make() for case in VALUES if case.is_there}
    (text,) = tracking_config(config=config).values()
    monkeypatch.setenv(CONFIG, text)
    expected = {case.key: case.plain for case in VALUES if case.is_there}
    assert stored(read(CONFIG, None)["config"]) == expected


def test_coroutines_in_different_blocks_and_their_threads_have_their_own(bare_environment):
    async def training(name, seen):
        with shared, tracking_config(project=name):
            await asyncio.sleep(0.05)
            seen.append(await asyncio.to_thread(read, CONFIG, None))
            while len(seen) < 2:
                await asyncio.sleep(0.01)
            seen.append(read(CONFIG, None))

    async def trainings():
        seen = []
        await asyncio.gather(training("a", seen), training("b", seen))
        return seen

    before, shared = dict(os.environ), tracking_config(group="shared")  # one object may be in several blocks
    assert pickle.loads(pickle.dumps(shared)) == shared
    assert sorted(config["project"] for config in asyncio.run(trainings())) == ["a", "a", "b", "b"]
    assert (read(CONFIG, None), dict(os.environ)) == ({}, before)
