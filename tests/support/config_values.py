"""Values as people have them in the configs of their trainings, and what a service has of each.

`VALUES` is the table. A case's `make` returns a new value, to be passed as one value of a config. `plain` is what W&B's
service has of it. `stored` makes of a value what W&B's service has of it. The values of which it has something else
with the bare client are a difference of `tests/parity`.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib.util
import math
import pathlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest.mock import ANY

# The service has nothing: wandb-core leaves out empty mappings.
ABSENT = "<absent>"


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Optimizer(str, enum.Enum):
    ADAM = "adam"


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Layer:
    width: int = 8
    path: pathlib.Path = pathlib.Path("/data")


@dataclasses.dataclass
class Model:
    layer: Layer = dataclasses.field(default_factory=Layer)
    colour: Colour = Colour.RED


class Plain:
    """An object without a text of its own."""

    def __init__(self) -> None:
        self.width = 8


class Told(Plain):
    def __repr__(self) -> str:
        return f"Told(width={self.width})"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Lazy(Mapping[str, Any]):
    """A mapping that is no dictionary."""

    def __getitem__(self, key: str) -> Any:
        return {"width": 8, "names": ("a", "b")}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("width", "names"))

    def __len__(self) -> int:
        return 2


class ConfigDict:
    """Like `ml_collections.ConfigDict`: no mapping, with `items` and `to_dict`."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_fields", values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: str) -> Any:
        return self._fields[key]

    def keys(self) -> Any:
        return self._fields.keys()

    def items(self) -> Any:
        return self._fields.items()

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


def training_step() -> None:
    """A function as a config's value."""


def _omegaconf(values: Any) -> Any:
    return __import__("omegaconf").OmegaConf.create(values)


def _attrs() -> Any:
    return __import__("attr").make_class("Settings", {"width": __import__("attr").ib(default=8)})()


def _pydantic() -> Any:
    pydantic = __import__("pydantic")
    inner = pydantic.create_model("Inner", width=(int, 8))
    return pydantic.create_model("Outer", inner=(inner, inner()), path=(pathlib.Path, pathlib.Path("/data")))()


def _pydantic_1() -> Any:
    v1 = __import__("pydantic.v1", fromlist=["v1"])
    return v1.create_model("Settings", width=(int, 8))()


def _numpy(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: make(__import__("numpy"))


def _torch(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: make(__import__("torch"))


def _cycle() -> Any:
    values: dict[str, Any] = {"lr": 1}
    values["self"] = [values]
    return values


def _deep(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Any]
    plain: Any
    needs: str = ""
    bare_ends: bool = True  # whether W&B's bare client returns

    @property
    def key(self) -> str:
        """Its name as every tracker takes the key of a config."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def is_there(self) -> bool:
        """Whether the package that it needs is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def stored(value: Any) -> Any:
    """What W&B's service has of a JSON value: NaN is null, and an empty mapping is not there."""
    if isinstance(value, dict):
        return {key: stored(item) for key, item in value.items()} or ABSENT
    if isinstance(value, list):
        return [stored(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


_MISSING = "(cannot be read: MissingMandatoryValue)"

_HERE = __name__

VALUES: tuple[Case, ...] = (
    # Scalars
    Case("text", lambda: "adam", "adam"),
    Case("unicode", lambda: "größe \u2713", "größe \u2713"),
    Case("half of a surrogate pair", lambda: "a\ud800", "a\ufffd"),
    Case("int", lambda: -3, -3),
    Case("large int", lambda: 2**70, float(2**70)),
    Case("huge int", lambda: 1 << 2000, hex(1 << 2000)),
    Case("float", lambda: 0.5, 0.5),
    Case("NaN", lambda: math.nan, None),
    Case("infinity", lambda: math.inf, math.inf),
    Case("bool", lambda: True, True),
    Case("None", lambda: None, None),
    Case("bytes", lambda: b"abc", "abc"),
    Case("bytes that are no text", lambda: b"a\xff", "a\ufffd"),
    # Sequences and sets
    Case("list", lambda: [1, "a", None], [1, "a", None]),
    Case("set", lambda: {3, 1, 2}, [1, 2, 3]),
    Case("range", lambda: range(3), [0, 1, 2]),
    Case("UserString", lambda: collections.UserString("ab"), "ab"),
    Case("iterator", lambda: iter([1]), "<list_iterator object>"),
    # Mappings
    Case("nested", lambda: {"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 2}]}}),
    Case("empty mapping", dict, ABSENT),
    Case("mappingproxy", lambda: types.MappingProxyType({"a": 1}), {"a": 1}),
    Case("UserDict", lambda: collections.UserDict(a=1), {"a": 1}),
    Case("mapping of another class", Lazy, {"width": 8, "names": ["a", "b"]}),
    Case("ConfigDict", lambda: ConfigDict(a=1, b=ConfigDict(c=2)), {"a": 1, "b": {"c": 2}}),
    Case("int keys", lambda: {1: "a"}, {"1": "a"}),
    Case("bool keys", lambda: {True: 1}, {"true": 1}),
    Case("None as a key", lambda: {None: 1}, {"None": 1}),
    Case("tuple keys", lambda: {(1, 2): 3}, {"1,2": 3}),
    Case("enum keys", lambda: {Colour.RED: 1}, {"red": 1}),
    # Objects with fields
    Case("Namespace", lambda: argparse.Namespace(lr=1), {"lr": 1}),
    Case("SimpleNamespace", lambda: types.SimpleNamespace(lr=1), {"lr": 1}),
    Case("dataclass", Model, {"layer": {"width": 8, "path": "/data"}, "colour": "RED"}),
    Case("namedtuple", lambda: Point(1, 2), {"x": 1, "y": 2}),
    Case("attrs", _attrs, {"width": 8}, needs="attr"),
    Case("pydantic", _pydantic, {"inner": {"width": 8}, "path": "/data"}, needs="pydantic"),
    Case("pydantic 1", _pydantic_1, {"width": 8}, needs="pydantic"),
    # Hydra's
    Case(
        "OmegaConf",
        lambda: _omegaconf({"a": [1, 2], "b": {"c": "${a}"}}),
        {"a": [1, 2], "b": {"c": [1, 2]}},
        needs="omegaconf",
    ),
    Case("OmegaConf, missing", lambda: _omegaconf({"a": "???"}), {"a": _MISSING}, needs="omegaconf"),
    Case("OmegaConf, missing in a list", lambda: _omegaconf({"a": [1, "???"]}), {"a": "[1, '???']"}, needs="omegaconf"),
    # Objects with a text
    Case("enum", lambda: Colour.RED, "RED"),
    Case("IntEnum", lambda: Level.HIGH, "HIGH"),
    Case("enum of texts", lambda: Optimizer.ADAM, "ADAM"),
    Case("path", lambda: pathlib.Path("/data"), "/data"),
    Case("datetime", lambda: datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    Case("Decimal", lambda: decimal.Decimal("0.10"), "0.10"),
    Case("function", lambda: training_step, f"{_HERE}.training_step"),
    Case("class", lambda: Plain, f"{_HERE}.Plain"),
    Case("partial", lambda: functools.partial(training_step), "functools.partial(<function training_step>)"),
    Case("object with a text", Told, "Told(width=8)"),
    Case("object", object, "<object object>"),
    Case("object without a text", Plain, f"<{_HERE}.Plain object>"),
    Case("object whose text raises", Broken, f"{_HERE}.Broken"),
    # NumPy's and torch's
    Case("float32", _numpy(lambda numpy: numpy.float32(0.5)), 0.5, needs="numpy"),
    Case("str_", _numpy(lambda numpy: numpy.str_("a")), "a", needs="numpy"),
    Case("datetime64", _numpy(lambda numpy: numpy.datetime64("2026-01-02")), "2026-01-02", needs="numpy"),
    Case("array", _numpy(lambda numpy: numpy.ones((2, 2))), [[1, 1], [1, 1]], needs="numpy"),
    Case("array of one", _numpy(lambda numpy: numpy.array([3.0])), [3.0], needs="numpy"),
    Case("large array", _numpy(lambda numpy: numpy.zeros(2000)), "[0. 0. 0. ... 0. 0. 0.]", needs="numpy"),
    Case("tensor without dimensions", _torch(lambda torch: torch.tensor(0.5)), 0.5, needs="torch"),
    Case("tensor", _torch(lambda torch: torch.ones(3, requires_grad=True)), [1, 1, 1], needs="torch"),
    Case("tensor of bfloat16", _torch(lambda torch: torch.tensor([1.0], dtype=torch.bfloat16)), [1.0], needs="torch"),
    Case(
        "tensor without data",
        _torch(lambda torch: torch.empty(3, device="meta")),
        "tensor(..., device='meta', size=(3,))",
        needs="torch",
    ),
    Case(
        "torch module",
        _torch(lambda torch: torch.nn.Linear(1, 1)),
        "Linear(in_features=1, out_features=1, bias=True)",
        needs="torch",
    ),
    # What does not end
    Case("cycle", _cycle, {"lr": 1, "self": ["{...}"]}),
    Case("deep", lambda: _deep(90), _deep(90)),
    Case("too deep", lambda: _deep(5000), ANY),
    Case("long range", lambda: range(10**12), "range(0, 1000000000000)", bare_ends=False),
)
