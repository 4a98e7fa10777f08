"""Checks of an argument's value, by the argument's name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from flyteplugins_tracking.errors import ConfigError


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a `value` that is not one of `allowed`, with the nearest one that is.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(sorted(allowed))}{_nearest(value, allowed)}")


def check_arguments(owner: str, given: Collection[str], allowed: Collection[str]) -> None:
    """Refuse argument names that `owner` does not have.

    Raises:
        ConfigError: At least one is unknown.
    """
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{owner} has no argument {name!r}{_nearest(name, allowed)}")


def check_seconds(name: str, value: object) -> None:
    """Refuse a `value` that is no positive and finite number.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name}={value!r} is no positive number of seconds")


def check_flag(name: str, value: object) -> None:
    """Refuse a `value` that is no truth value.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is neither True nor False")


def check_text(name: str, value: object) -> None:
    """Refuse a `value` that is neither None nor text.

    Raises:
        ConfigError: It is neither.
    """
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{name}={value!r} is no text")


def check_texts(name: str, values: object) -> tuple[str, ...] | None:
    """The `values` as a tuple; None for None.

    Raises:
        ConfigError: They are no sequence of texts.
    """
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{name}={values!r} is no sequence of texts")
    texts = tuple(values)
    for text in texts:
        check_text(f"an entry of {name}", text)
    return texts


# What other tools call the same thing.
_SYNONYMS = {
    "node": "worker",
    "host": "worker",
    "machine": "worker",
    "local": "worker",
    "job": "global",
    "world": "global",
    "all": "shared",
    "per_rank": "new",
    "weights_and_biases": "wandb",
}


def _nearest(value: object, allowed: Collection[str]) -> str:
    synonym = _SYNONYMS.get(str(value).lower().replace("-", "_"))
    close = [synonym] if synonym in allowed else difflib.get_close_matches(str(value), allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
