"""Sweeps: real agents of the real client, against the recording server."""

from __future__ import annotations

import inspect
import json
import os
import pickle

import pytest

from flyteplugins_tracking import (
    ConfigError,
    get_sweep_id,
    get_sweep_parameters,
    tracking_sweep,
    tracking_sweep_config,
)
from flyteplugins_tracking._runs.propagation import CONFIG, SWEEP, SWEEP_ID
from flyteplugins_tracking._sweeps.sweep import SweepLink

GRID = {"method": "grid", "parameters": {"x": {"values": [1]}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"early_terminat": {}}, "has no argument 'early_terminat'; did you mean 'early_terminate'?"),
        ({"prior_runs": "one"}, "prior_runs must be a sequence of strings, got 'one'"),
        ({"project": 3}, "project must be a non-empty string, got 3"),
        ({"download_logs": True}, "has no argument 'download_logs'"),
    ],
)
@pytest.mark.parametrize("function", [tracking_sweep_config, tracking_sweep])
def test_invalid_arguments_are_refused_at_once(function, arguments, message):
    with pytest.raises(ConfigError) as error:
        function(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("target", ["p", print.__class__, 3, property(print)])
def test_a_target_that_is_not_a_function_is_refused_by_name(target):
    with pytest.raises(ConfigError, match="tracking_sweep"):
        tracking_sweep(target)


def test_a_sweep_without_method_or_parameters_is_not_created(bare_environment):
    called = []
    with pytest.raises(ConfigError, match="no method= and no parameters=: pass them to tracking_sweep"):
        tracking_sweep(project="p")(called.append)(1)
    with tracking_sweep_config(method="grid"), pytest.raises(ConfigError, match="the sweep has no parameters=:"):
        tracking_sweep(called.append)(1)
    assert called == []


def test_without_a_sweep_there_is_no_id_and_no_parameter(bare_environment):
    assert (get_sweep_id(), get_sweep_parameters()) == (None, {})


def test_the_configuration_is_one_value_that_blocks_add_to(bare_environment):
    outer = tracking_sweep_config(method="grid", name="outer", run_cap=3)
    assert json.loads(outer[SWEEP]) == {"method": "grid", "name": "outer", "run_cap": 3}
    with outer, tracking_sweep_config(name="inner"):
        inner = json.loads(os.environ[SWEEP])
    assert inner == {"method": "grid", "name": "inner", "run_cap": 3}


def test_the_link_leads_to_the_sweep_and_before_it_exists_to_the_projects_sweeps(bare_environment):
    def page(link: SweepLink, **context: dict) -> str:
        custom_context = {key: json.dumps(value) for key, value in context.items()}
        return link.get_link(run_name="r", context=custom_context, action_name="a1")

    link = pickle.loads(pickle.dumps(SweepLink({"project": "p", "entity": "e"})))
    assert page(link) == "https://wandb.ai/e/p/sweeps"
    assert page(link, **{SWEEP_ID: {"id": "s", "project": "q", "entity": "f"}}) == "https://wandb.ai/f/q/sweeps/s"
    anywhere = SweepLink({"host": "https://w.example"})
    assert page(anywhere) == "https://w.example"
    assert page(anywhere, **{CONFIG: {"project": "p", "entity": "e"}}) == "https://w.example/e/p/sweeps"
    assert page(anywhere, **{SWEEP: {"project": 3}}) == "https://w.example"


def test_an_async_function_stays_one():
    async def search() -> None:
        pass

    assert inspect.iscoroutinefunction(tracking_sweep(**GRID)(search))


def test_a_flyte_2_task_stays_the_same_object_and_gains_one_link():
    flyte = pytest.importorskip("flyte")
    env = flyte.TaskEnvironment(name="links")

    @env.task
    async def bare(n: int) -> int:
        return n

    links = bare.links
    assert tracking_sweep(**GRID)(bare) is bare
    assert [link.name for link in bare.links] == [*(link.name for link in links), "Weights & Biases sweep"]
