"""Arguments: which are accepted, and which are refused at decoration, before anything is opened."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import pickle
import types
from pathlib import Path

import pytest
from support.config_values import VALUES, ConfigDict, Lazy, stored

from flyteplugins_tracking import ConfigError, TrackerUnavailableError, tracking_config, tracking_init
from flyteplugins_tracking._util.plain import plain_config
from flyteplugins_tracking.trackers.config import OWN_ARGUMENTS, TrackingConfig


class Optimizer(enum.Enum):
    ADAM = "adam"


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    path: Path = Path("/data")
    optimizer: Optimizer = Optimizer.ADAM


LAYER = {"width": 8}


@dataclasses.dataclass
class Both(dict[str, float]):
    lr: float = 0.1


class Unreadable(Lazy):
    def __iter__(self):
        raise OSError("gone")


class BadKey:
    def __str__(self):
        raise ValueError("no text")


class Callable(types.SimpleNamespace):
    def __call__(self): ...


class Flags:
    """Like `absl.flags.FLAGS`."""

    def flag_values_dict(self):
        return {"lr": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run_mode": "atuo"}, "run_mode='atuo' is not one of auto, new, shared; did you mean 'auto'?"),
        (
            {"run_file": "gs://bucket/run.json"},
            "run_file='gs://bucket/run.json' is an address: pass the path",
        ),
        ({"rank_scope": "node"}, "rank_scope='node' is not one of global, worker"),
        ({"primary_rank": "last"}, "primary_rank must be an int such as 0, or -1 for the last rank; or a callable"),
        ({"primary_rank": True}, "such an int; got True"),
        ({"tracker": "wanbd"}, "did you mean 'wandb'?"),
        ({"if_unavailable": "ignore"}, "if_unavailable='ignore' is not one of degrade, raise"),
        ({"projct": "p"}, "has no argument 'projct'; did you mean 'project'?"),
        ({"finish_timeout_s": 5}, "has no argument 'finish_timeout_s'"),
        ({"mode": "ofline"}, "mode='ofline' is not one of disabled, dryrun, offline, online; did you mean 'offline'?"),
        ({"resume": "alow"}, "did you mean 'allow'?"),
        ({"reinit": "create"}, "reinit='create' is not one of"),
        ({"settings": 3}, "settings= must be a mapping or a wandb.Settings, got int"),
        ({"init_timeout_s": 0}, "init_timeout_s must be a positive number of seconds, got 0"),
        ({"stop_before_s": "1 h"}, "stop_before_s must be a positive number of seconds, got '1 h'"),
        ({"kill_after_s": float("nan")}, "kill_after_s must be a positive number of seconds, got nan"),
        ({"role": ""}, "role must be a non-empty string, got ''"),
        ({"id": "a/b:c"}, "run id 'a/b:c' contains / :, which W&B does not accept in an id"),
        *(
            ({"tracker": tracker, "id": run_id}, message)
            for tracker in ("mlflow", "trackio")
            for run_id, message in {
                "a/b": "id='a/b' cannot be a run id: use letters, digits, '-', '_' and '.'",
                "../../x": "id='../../x' cannot be",
                "..": "id='..' cannot be",
                "a\nb": "cannot be a run id",
                "a\0b": "id contains a null character or half of a surrogate pair: 'a\\x00b'",
                "a\ud800": "or half of a surrogate pair: 'a\\ud800'",
                "a" * 10_000: "id has 10000 characters, and at most 100 can be used",
            }.items()
        ),
        *(
            ({name: text}, f"{name} {problem}")
            for name in ("project", "group", "name")
            for text, problem in {
                "a\0": "contains a null character",
                "\udcff": "contains a null character or half",
                "a" * 501: "has 501 characters, and at most 500",
            }.items()
        ),
        ({"notes": "a\0"}, "notes contains a null character"),
        ({"tags": ["a\0"]}, "each entry of tags contains a null character"),
        ({"project": "a/b"}, "project 'a/b' contains /, which W&B does not accept in a project"),
        ({"tags": [1]}, "each entry of tags must be a non-empty string, got 1"),
        ({"mode": "shared"}, "pass run_mode='shared'"),
        ({"rank_prefix": "yes"}, "rank_prefix must be True or False, got 'yes'"),
        ({"step_metric": ""}, "step_metric must be a non-empty string, got ''"),
        ({"config": print}, "config must be a mapping, a dataclass or a namespace, got builtin_function_or_method"),
        ({"config": [("lr", 1)]}, "config must be a mapping, a dataclass or a namespace, got list"),
        ({"config": Unreadable()}, "the keys of config cannot be read: OSError: gone. Pass a mapping of its values"),
    ],
)
def test_invalid_arguments_are_refused_at_decoration(arguments, message):
    with pytest.raises(ConfigError) as caught:
        tracking_init(**arguments)
    assert message in str(caught.value)


def test_the_value_of_every_argument_is_checked():
    for name in OWN_ARGUMENTS:
        with pytest.raises(ConfigError, match=name):
            tracking_init(**{name: object()})


@pytest.mark.parametrize(("kill_after_s", "finish_timeout_s"), [(30, 25), (600, 595), (10, 5), (4, 2), (0.5, 0.25)])
def test_the_last_seconds_before_the_kill_are_left_to_the_process(kill_after_s, finish_timeout_s):
    config = TrackingConfig(kill_after_s=kill_after_s)
    assert config.finish_timeout_s == finish_timeout_s
    assert config.finish_limit == f"{finish_timeout_s} s (kill_after_s={kill_after_s})"


def test_a_key_in_place_of_a_secret_or_in_the_settings_is_refused_and_not_shown():
    key, secret = "0123456789" * 4, "secret must be a flytekit Secret or a callable"
    for arguments, message in (
        ({"secret": key}, secret),
        ({"secret": key.encode()}, secret),
        ({"settings": {"api_key": key}}, "pass secret="),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            tracking_init(**arguments)
        assert key not in str(caught.value)


ADDRESS = "https://me@example.com:se/cret@host/path"


@pytest.mark.parametrize(
    "arguments",
    [
        {"tracker": "wandb", "host": ADDRESS},
        {"tracker": "wandb", "settings": {"base_url": ADDRESS}},
        {"tracker": "wandb", "settings": {"https_proxy": ADDRESS}},
        {"tracker": "mlflow", "tracking_uri": ADDRESS},
        {"tracker": "mlflow", "link_host": ADDRESS},
        {"tracker": "mlflow", "link_host": "ftp://me:se/cret@host"},
        {"tracker": "trackio", "server_url": ADDRESS},
        {"tracker": "trackio", "server_url": "https://me:se/cret@host"},
        {"tracker": "pluto", "settings": {"url_api": ADDRESS}},
        {"tracker": "pluto", "settings": {"http_proxy": ADDRESS}},
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(arguments):
    with pytest.raises(ConfigError, match="would be pickled with the task") as refused:
        tracking_init(**arguments)
    assert "se/cret" not in str(refused.value)


def test_no_error_shows_a_key_or_a_password(monkeypatch):
    monkeypatch.setenv("PLUTO_API_KEY", "key-of-pluto")
    error = TrackerUnavailableError(f"{ADDRESS} refuses key-of-pluto", f"use {ADDRESS}")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (str(one), one.reason) == (
            "https://***@host/path refuses ***; or use https://***@host/path.",
            "https://***@host/path refuses ***",
        )


def test_secrets_and_options_stay_out_of_the_repr():
    config = TrackingConfig(secret=lambda: "canary", options={"settings": {"canary": 1}})
    assert "canary" not in repr(config)
    assert "lambda" not in repr(config)


def test_configs_become_plain_json():
    numpy = pytest.importorskip("numpy", reason="numpy is not installed: pip install -e . --group demo")
    plain = {"lr": 0.1, "path": "/data", "optimizer": "ADAM"}
    assert plain_config(None) == {}
    assert plain_config(Settings()) == plain
    assert plain_config({"s": Settings(), 1: (True, None)}) == {"s": plain, "1": [True, None]}
    assert plain_config({"a": numpy.float32(0.5), "b": numpy.arange(2)}) == {"a": 0.5, "b": [0, 1]}


def test_each_kind_of_value_becomes_plain_once_and_for_all(subtests):
    for case in VALUES:
        with subtests.test(case.name):
            if not case.is_there:
                pytest.skip(f"{case.needs} is not installed")
            plain = plain_config({"a": {"b": case.make()}})
            assert stored(plain["a"]) == {"b": case.plain}
            assert json.dumps(plain_config(plain)) == json.dumps(plain)
            assert len(json.dumps(plain)) < 30_000


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (Settings, {"lr": 0.1}),
        (types.SimpleNamespace(lr=1, _seed=2), {"lr": 1, "_seed": 2}),
        (type("Base", (), {"lr": 1, "steps": 2}), {"lr": 1, "steps": 2}),
        (type("Own", (type("Base", (), {"lr": 1, "steps": 2}),), {"lr": 3}), {"lr": 3, "steps": 2}),
        (Callable(lr=1), {"lr": 1}),
        (ConfigDict(lr=1, more=ConfigDict(a=(1,))), {"lr": 1, "more": {"a": [1]}}),
        (Lazy(), {"width": 8, "names": ["a", "b"]}),
        (Flags(), {"lr": 1}),
        (Both(), {"lr": 0.1}),
        (argparse.Namespace(lr=0.1), {"lr": 0.1}),
        # An object that occurs twice is kept twice, and one that cannot be read becomes its text.
        ({"layers": [LAYER, LAYER], "again": LAYER}, {"layers": [LAYER, LAYER], "again": LAYER}),
        (
            {"a": [1, Unreadable()], "b": {BadKey(): 1}},
            {"a": [1, f"<{__name__}.Unreadable object>"], "b": {f"{__name__}.BadKey": 1}},
        ),
    ],
)
def test_what_is_used_as_a_config_gives_its_values(config, plain):
    assert plain_config(config).items() >= plain.items()
    assert not any(key.startswith("__") for key in plain_config(config))


def test_a_module_that_is_used_as_a_config_gives_its_values():
    module = types.ModuleType("settings")
    exec("lr = 1\ndef train(): ...\n", vars(module))
    assert plain_config(module) == {"lr": 1, "train": "settings.train"}


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_string_is_not_given(empty):
    names = ("id", "project", "group", "name", "notes", "entity", "job_type", "mode", "host", "dir")
    config = TrackingConfig.from_arguments({**dict.fromkeys(names, empty), "tags": [empty, ""]})
    assert config.given == frozenset()
    assert (config.arguments, config.name, config.tags) == (dict.fromkeys(names[5:]), None, None)
    tracking_init(**dict.fromkeys(names, empty), tags=empty)
    tracking_init(tracker="mlflow", project=empty, experiment_name=empty, tracking_uri=empty)
    tracking_init(tracker="trackio", project=empty, server_url=empty)
    tracking_init(tracker="pluto", project=empty)
    propagated = {"project": "p", "tags": ["t"], "notes": "why"}
    assert config.with_defaults(propagated).arguments == {"project": "p", "tags": ("t",), "notes": "why"}
    with pytest.raises(ConfigError, match="did you mean 'project'"):
        tracking_init(projct=empty)
    given = TrackingConfig.from_arguments(propagated)
    assert given.for_parent({"project": empty, "notes": empty}).arguments == given.arguments
    assert tracking_config(project=empty, name=empty) == tracking_config()


def test_empty_tags_are_left_out():
    given = [("a", ("a",)), (["a", "", " ", None], ("a",)), ([None], None), ({"a"}, ("a",)), ([], ()), (None, None)]
    for tags, kept in [*given, ({"team": "x", "n": 1}, ("team=x", "n=1")), ({}, ())]:
        assert TrackingConfig.from_arguments({"tags": tags}).tags == kept, tags


def test_the_config_is_a_copy():
    original = {"layers": [1]}
    config = TrackingConfig.from_arguments({"config": original, "run_file": Path("ckpt", "run.json")})
    original["layers"].append(2)
    assert (config.config, config.run_file) == ({"layers": [1]}, "ckpt/run.json")
