"""A user's config as plain JSON values, whatever it is made of: one conversion for all trackers.

Nothing is imported for it: pydantic, attrs, absl, NumPy and torch are known by what their objects have. What is no
mapping, sequence, number, text or array becomes its text, as W&B does.
"""

from __future__ import annotations

import enum
import json
import math
import re
import sys
from collections import UserString
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from flyteplugins_tracking.errors import ConfigError

# The largest array that becomes a list, as in W&B; the longest sequence that may compute its items, such as a range or
# a data set; and the longest text of another object.
_LARGEST_ARRAY, _LONGEST_COMPUTED, _LONGEST_TEXT = 32, 10_000, 10_000
# How deep values may be in each other. What is deeper is left out.
_DEEPEST = 100
# The largest int, in bits, that JSON's readers take for a number.
_LARGEST_INT_BITS = 1023
# Where an object is in memory: it differs in each process, and says nothing.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NO_CONFIGS = (str, bytes, Sequence, Set, FunctionType, BuiltinFunctionType, MethodType)


def plain_config(config: object, name: str = "config") -> dict[str, Any]:
    """Return a copy of `config` as plain JSON values, which may be NaN or infinite.

    What is like a mapping becomes one; sequences and sets become lists; scalars of NumPy and torch numbers; and all
    else its text.

    Raises:
        ConfigError: It is nothing like a mapping, or does not say its keys.
    """
    if config is None:
        return {}
    values = _mapping_of(config)
    if values is None:
        values = _attributes_of(config)
    if values is None:
        raise ConfigError(f"{name} must be a mapping, a dataclass or a namespace, got {type(config).__name__}")
    try:
        return _mapping(values, (id(config),))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the keys of {name} cannot be read: {reason}. Pass a mapping of its values") from error


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with text for NaN and infinities, and for what is not plain: JSON has no numbers for them."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_text), parse_constant=str)
    return plain


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config with one key for each value: `optimizer.lr` for a value in a mapping."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def _attributes_of(config: object) -> Mapping[str, Any] | None:
    """Return the attributes of an object, a class or a module that is used as a config."""
    if isinstance(config, _NO_CONFIGS) or not hasattr(config, "__dict__"):
        return None
    if not isinstance(config, (type, ModuleType)):
        return vars(config)
    kinds = [kind for kind in reversed(config.__mro__) if kind is not object] if isinstance(config, type) else [config]
    found = {name: value for kind in kinds for name, value in vars(kind).items()}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _plain(value: Any, inside: tuple[int, ...]) -> Any:
    """Return a value as plain values. `inside` are the objects that it is in."""
    try:
        for kinds, convert in _SCALARS:
            if isinstance(value, kinds):
                return convert(value)
        mapping = _mapping_of(value)
        if mapping is None and not isinstance(value, (Sequence, Set)):
            return _array(value, inside) if hasattr(type(value), "tolist") else _text(value)
        if len(inside) > _DEEPEST or id(value) in inside:
            return "[...]" if mapping is None else "{...}"
        inside = (*inside, id(value))
        if mapping is not None:
            return _mapping(mapping, inside)
        if not isinstance(value, (list, tuple)) and len(value) > _LONGEST_COMPUTED:
            return _text(value)
        # A set in an order that is the same in each process, and so after a restart.
        return [_plain(item, inside) for item in (sorted(value, key=_text) if isinstance(value, Set) else value)]
    except Exception:
        return _text(value)


def _mapping(values: Any, inside: tuple[int, ...]) -> dict[str, Any]:
    # `keys()`, because some are no mappings, and iterate otherwise.
    return {_key(key): _plain(_item_of(values, key), inside) for key in list(values.keys())}


def _item_of(values: Any, key: Any) -> Any:
    try:
        return values[key]
    except Exception as error:
        return f"(cannot be read: {type(error).__name__})"


def _key(key: Any) -> str:
    """Return a key as W&B shows it."""
    if isinstance(key, enum.Enum):
        return _key(key.value)
    if isinstance(key, bool):
        return str(key).lower()
    if isinstance(key, tuple):
        return ",".join(map(_key, key))
    return _string(key) if isinstance(key, str) else _text(key)


def _array(value: Any, inside: tuple[int, ...]) -> Any:
    """Return a scalar or an array of NumPy, torch or JAX as a number or a list. A large one becomes its text."""
    if math.prod(getattr(value, "shape", ())) > _LARGEST_ARRAY:
        return _text(value)
    items = value.tolist()  # raises for a tensor without data
    return _text(value) if type(items) is type(value) else _plain(items, inside)


def _mapping_of(value: Any) -> Any:
    """Return what has the keys and values of an object that is like a mapping; None for another object."""
    for has_fields, fields_of in _WITH_FIELDS:
        if has_fields(type(value)):
            return fields_of(value)
    return value if isinstance(value, Mapping) or _has_items(value) else None


def _has_items(value: Any) -> bool:
    """Whether it is like `ml_collections.ConfigDict`, and neither a table nor a module of torch."""
    kind = type(value)
    has_items = all(callable(getattr(kind, name, None)) for name in ("keys", "items", "__getitem__"))
    return has_items and not callable(value) and not hasattr(kind, "shape")


def _present(value: Any, fields: Iterable[Any]) -> dict[str, Any]:
    """Return the attributes that are there: a field may have no value."""
    return {field.name: getattr(value, field.name) for field in fields if hasattr(value, field.name)}


# What tells by its class that it has fields, and how they are read. A dataclass may also be a mapping.
_WITH_FIELDS: Sequence[tuple[Callable[[type], bool], Callable[[Any], Any]]] = (
    (
        lambda kind: hasattr(kind, "__dataclass_fields__"),
        lambda value: _present(value, sys.modules["dataclasses"].fields(value)),
    ),
    (lambda kind: hasattr(kind, "__attrs_attrs__"), lambda value: _present(value, type(value).__attrs_attrs__)),
    (  # pydantic 2 and 1
        lambda kind: hasattr(kind, "__pydantic_fields__") or hasattr(kind, "__fields_set__"),
        lambda value: {**vars(value), **(getattr(value, "__pydantic_extra__", None) or {})},
    ),
    (lambda kind: issubclass(kind, tuple) and hasattr(kind, "_asdict"), lambda value: value._asdict()),
    (lambda kind: hasattr(kind, "flag_values_dict"), lambda value: value.flag_values_dict()),  # absl
    (lambda kind: issubclass(kind, SimpleNamespace) or hasattr(kind, "_get_kwargs"), vars),  # argparse
)


def _text(value: Any) -> str:
    """Return the text of an object, without its place in memory; or the name of its class."""
    try:
        if callable(value) and hasattr(value, "__qualname__"):
            text = _name_of(value)
        else:
            text = str(value.isoformat() if hasattr(type(value), "isoformat") else value)
    except Exception:
        text = _name_of(type(value))
    text = _string(_ADDRESS.sub("", text))
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _name_of(value: Any) -> str:
    """Return the name of a class or a function, with its module."""
    return f"{value.__module__}.{value.__qualname__}"


def _string(value: str) -> str:
    """Return a string that UTF-8 can hold."""
    return str.__str__(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# The scalars, each with what it becomes. The first that holds: an enum may also be an int or a string.
_SCALARS: Sequence[tuple[Any, Callable[[Any], Any]]] = (
    (enum.Enum, lambda value: _text(value.name or value)),  # combined flags have no name before 3.11
    ((bool, type(None)), lambda value: value),
    (str, _string),
    (int, lambda value: int.__int__(value) if value.bit_length() <= _LARGEST_INT_BITS else hex(value)[:_LONGEST_TEXT]),
    (float, float.__float__),
    (bytes, lambda value: value.decode("utf-8", "replace")),
    (UserString, lambda value: _string(value.data)),  # a sequence of its own class
)
