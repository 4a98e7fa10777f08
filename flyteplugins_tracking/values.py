"""Values as `dataclasses` makes them, for what every rank loads: importing that module takes longer than all of this.

To type checkers, and to the functions of `dataclasses`, they are dataclasses.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any
else:

    def dataclass(*, frozen=False, eq=True):
        """See `dataclasses.dataclass`, of whose arguments these are known."""
        return lambda cls: _made(cls, frozen, eq)

    def field(**options):
        """See `dataclasses.field`, of whose arguments `default`, `default_factory` and `repr` are known."""
        return _Field(options)

    def replace(value, /, **changes):
        """See `dataclasses.replace`."""
        if type(value).__init__ is not _init:  # of a subclass, which may be a real one
            import dataclasses

            return dataclasses.replace(value, **changes)
        return type(value)(**{**dict(zip(value.__shape__.names, _values(value), strict=True)), **changes})


class _Field:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


class _Shape:
    """The fields of a class: their names, and what is declared of them."""

    def __init__(self, cls: type, frozen: bool, eq: bool) -> None:
        self.cls, self.frozen, self.eq = cls, frozen, eq
        self.names = tuple(cls.__annotations__)
        self.known = frozenset(self.names)
        self.declared = {name: value for name, value in vars(cls).items() if name in self.names}
        options = {
            name: value.options if isinstance(value, _Field) else {"default": value}
            for name, value in self.declared.items()
        }
        self.defaults = {name: one["default"] for name, one in options.items() if "default" in one}
        self.factories = {name: one["default_factory"] for name, one in options.items() if "default_factory" in one}
        self.shown = [name for name in self.names if options.get(name, {}).get("repr", True)]
        self._real: Any = None

    def real(self) -> Any:
        """The real dataclass with the same fields."""
        if self._real is None:
            import dataclasses

            members = {
                name: dataclasses.field(**value.options) if isinstance(value, _Field) else value
                for name, value in self.declared.items()
            }
            members |= {"__annotations__": self.cls.__annotations__, "__module__": self.cls.__module__}
            self._real = dataclasses.dataclass(frozen=self.frozen, eq=self.eq)(type(self.cls.__name__, (), members))
        return self._real


class _OfReal:
    """What the functions of `dataclasses` know their own by; made when somebody first asks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: Any) -> Any:
        value = getattr(owner.__shape__.real(), self.name)
        setattr(owner.__shape__.cls, self.name, value)  # some look into the class's `__dict__`
        return value


class _SignatureOfReal:
    def __get__(self, instance: object, owner: Any) -> Any:
        if owner.__init__ is not _init:
            raise AttributeError("a subclass has the signature of its own __init__")
        import inspect

        return inspect.signature(owner.__shape__.real())


def _made(cls: Any, frozen: bool, eq: bool) -> Any:
    shape = cls.__shape__ = _Shape(cls, frozen, eq)
    for name in shape.declared.keys() - shape.defaults.keys():
        delattr(cls, name)
    for name in shape.defaults:
        setattr(cls, name, shape.defaults[name])
    cls.__match_args__ = shape.names  # type: ignore[misc]
    for name in ("__dataclass_fields__", "__dataclass_params__"):
        setattr(cls, name, _OfReal(name))
    cls.__signature__ = _SignatureOfReal()
    cls.__init__, cls.__repr__, cls.__replace__ = _init, _repr, replace
    if eq:
        cls.__eq__, cls.__hash__ = _eq, _hash
    if frozen:
        cls.__setattr__, cls.__delattr__ = _refuse, _refuse
    return cls


def _init(self: Any, /, *positional: Any, **named: Any) -> None:
    shape = self.__shape__
    values = {**shape.defaults, **dict(zip(shape.names, positional, strict=False)), **named}
    for name, factory in shape.factories.items():
        if name not in values:
            values[name] = factory()
    given = len(positional)
    if values.keys() != shape.known or given > len(shape.names) or not named.keys().isdisjoint(shape.names[:given]):
        shape.real()(*positional, **named)  # says what is wrong
    self.__dict__.update({name: values[name] for name in shape.names})
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _repr(self: Any) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name in self.__shape__.shown)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__shape__.names)


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _refuse(self: Any, name: str, *_: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"{type(self).__name__} is frozen: {name!r} cannot be changed; make another with replace")
