"""Frozen values with named fields, for modules that a rank without a run loads.

`dataclasses` would compile code for each class, 0.5 ms, and import `inspect`, 7 ms: on every rank of a job.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        """Return a decorator that does nothing: only type checkers need the real one."""
        return lambda cls: cls


R = TypeVar("R", bound="Record")


@functools.cache
def _fields_of_dataclass(cls: Any) -> Any:
    import dataclasses

    made: Any = dataclasses.make_dataclass(cls.__name__, [(name, Any, None) for name in cls._fields])
    return made.__dataclass_fields__


class _DataclassFields:
    """What makes `dataclasses.replace`, `fields` and `asdict` take a record. They have imported `dataclasses`."""

    def __get__(self, record: object, cls: Any) -> Any:
        return _fields_of_dataclass(cls)


@dataclass_transform(frozen_default=True)
class Record:
    """A frozen value. Its fields are its annotations, in their order; a class attribute of the name is the default."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    # The fields that `repr` leaves out.
    _hidden: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __init_subclass__(cls) -> None:
        own = (name for name in cls.__annotations__ if name not in cls._fields and not name.startswith("_"))
        cls._fields = (*cls._fields, *own)
        setattr(cls, "__match_args__", cls._fields)  # noqa: B010 mypy takes a record for a dataclass, which has its own
        cls._defaults = {name: getattr(cls, name) for name in cls._fields if hasattr(cls, name)}

    def __init__(self, *args: Any, **given: Any) -> None:
        own = {**dict(zip(self._fields, args, strict=False)), **given}
        self.__dict__.update(self._defaults, **own)
        if len(own) != len(args) + len(given) or self.__dict__.keys() != set(self._fields):
            raise TypeError(
                f"{type(self).__name__} takes each of {', '.join(self._fields)} once, got {len(args)} values and "
                f"{', '.join(given) or 'no names'}"
            )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values. Called last."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be removed")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *(self.__dict__[name] for name in self._fields)))

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self._fields if name not in self._hidden)
        return f"{type(self).__name__}({', '.join(shown)})"


def replace(record: R, **changes: Any) -> R:
    """Return a record with these values in place of its own."""
    return type(record)(**{**{name: getattr(record, name) for name in record._fields}, **changes})
