"""`values` makes what `dataclasses` makes, and its functions take it for that."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys

import pytest

from flyteplugins_tracking import DistributedInfo, RunPlan, values


def body(module):
    """The same class, by either module."""

    @module.dataclass(frozen=True)
    class Value:
        rank: int
        name: str = "n"
        secret: str = module.field(default="s", repr=False)
        config: dict[str, int] = module.field(default_factory=dict)

        def __post_init__(self):
            if self.rank < 0:
                raise ValueError(self.rank)

        @property
        def double(self):
            return 2 * self.rank

    return Value


OURS, REAL = body(values), body(dataclasses)


@pytest.mark.parametrize(
    "arguments", [((1,), {}), ((1, "x"), {}), ((), {"rank": 2, "config": {"a": 1}}), ((1, "x", "y", {}), {})]
)
def test_it_is_what_the_real_one_is(arguments):
    positional, named = arguments
    ours, real = OURS(*positional, **named), REAL(*positional, **named)
    assert dataclasses.asdict(ours) == dataclasses.asdict(real) == vars(real) == vars(ours)
    assert [*vars(ours)] == [*vars(real)]
    assert dataclasses.is_dataclass(ours)
    assert [(f.name, f.type, f.repr) for f in dataclasses.fields(ours)] == [
        (f.name, f.type, f.repr) for f in dataclasses.fields(real)
    ]
    assert (repr(ours), ours.double, OURS.__match_args__) == (repr(real), real.double, REAL.__match_args__)
    assert "'s'" not in repr(ours)
    for replaced in (values.replace(ours, name="z"), dataclasses.replace(ours, name="z")):
        assert dataclasses.asdict(replaced) == dataclasses.asdict(dataclasses.replace(real, name="z"))
    assert ours == OURS(*positional, **named)
    assert ours != values.replace(ours, rank=7)
    assert ours != real


@pytest.mark.parametrize(
    "arguments",
    [
        ((), {}),
        ((1,), {"rank": 1}),
        ((1, "x", "y", {}, 5), {}),
        ((1,), {"nmae": "x"}),
        ((), {"name": "x"}),
        ((), {"nmae": "x"}),
    ],
)
def test_wrong_arguments_are_refused_as_by_the_real_one(arguments):
    for kind in (OURS, REAL):
        with pytest.raises(TypeError):
            kind(*arguments[0], **arguments[1])


def test_the_error_names_the_wrong_argument():
    with pytest.raises(TypeError, match="nmae"):
        OURS(1, nmae="x")
    with pytest.raises(TypeError, match="rank"):
        OURS()


def test_it_is_checked_and_frozen():
    for kind in (OURS, REAL):
        with pytest.raises(ValueError, match="-1"):
            kind(-1)
        with pytest.raises(ValueError, match="-1"):
            dataclasses.replace(kind(1), rank=-1)
        with pytest.raises(dataclasses.FrozenInstanceError, match="rank"):
            kind(1).rank = 2
        with pytest.raises(dataclasses.FrozenInstanceError, match="rank"):
            del kind(1).rank


def test_each_has_a_default_of_its_own():
    one, other = OURS(1), OURS(1)
    one.config["a"] = 1
    assert other.config == {}
    assert not hasattr(OURS, "config")


def test_it_hashes_and_travels():
    plan, info = RunPlan(opens=True, run_id="r"), DistributedInfo(rank=1, world_size=2)
    assert {plan: 1}[RunPlan(opens=True, run_id="r")] == 1
    assert pickle.loads(pickle.dumps((plan, info))) == (plan, info) == copy.deepcopy((plan, info))
    if sys.version_info >= (3, 13):
        assert copy.replace(info, rank=0).rank == 0


def test_its_signature_is_that_of_its_fields():
    assert str(inspect.signature(OURS)) == str(inspect.signature(REAL))
    assert [*inspect.signature(RunPlan).parameters] == list(RunPlan.__match_args__)


def test_a_match_statement_takes_it_apart():
    match DistributedInfo(rank=1, world_size=2):
        case DistributedInfo(rank, world_size, launcher=launcher):
            assert (rank, world_size, launcher) == (1, 2, "override")
        case _:
            pytest.fail("no match")


@pytest.mark.parametrize("value", [OURS, REAL])
def test_a_subclass_is_one_too(value):
    class Plain(value):
        pass

    class Own(value):
        note: str = ""

        def __init__(self, text):
            super().__init__(rank=int(text), nmae="x")

    assert [field.name for field in dataclasses.fields(Plain)] == ["rank", "name", "secret", "config"]
    assert dataclasses.asdict(Plain(1)) == dataclasses.asdict(value(1))
    assert dataclasses.replace(Plain(1), rank=2) == Plain(2)
    assert str(inspect.signature(Plain)) == str(inspect.signature(value))
    assert str(inspect.signature(Own)) == "(text)"
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'rank'"):
        Plain()
    with pytest.raises(TypeError, match="nmae"):
        Own("1")


@pytest.mark.parametrize("value", [OURS, REAL])
@pytest.mark.parametrize("replace", [values.replace, dataclasses.replace])
def test_a_real_one_can_inherit_from_it(value, replace):
    @dataclasses.dataclass(frozen=True)
    class More(value):
        more: int = 0
        named: int = dataclasses.field(default=0, kw_only=True)

    one = replace(More(1, more=2, named=3), name="z")
    assert (one.rank, one.name, one.more, one.named) == (1, "z", 2, 3)
    assert one == More(1, "z", more=2, named=3) != More(1, "z", more=2)
    assert "more" not in value.__dataclass_fields__
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rank = 2
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(type("Open", (value,), {}))


def test_one_that_is_compared_by_identity_can_change():
    @values.dataclass(eq=False)
    class Entry:
        count: int = 0

    one = Entry()
    one.count += 1
    assert one != Entry(1)
    assert len({one, Entry(1)}) == 2
