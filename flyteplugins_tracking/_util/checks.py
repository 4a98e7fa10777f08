"""Checks of an argument's value, by the argument's name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from flyteplugins_tracking._util.text import has_credentials
from flyteplugins_tracking.errors import ConfigError


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a `value` that is not one of `allowed`, and suggest the nearest one.

    Raises:
        ConfigError: The value is not allowed.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(sorted(allowed))}{_nearest(value, allowed)}")


def check_arguments(owner: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Refuse argument names that are not `allowed`.

    Args:
        owner: The function that the error names.
        names: The names of the arguments.
        allowed: The names that `owner` takes.

    Raises:
        ConfigError: At least one name is unknown.
    """
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{owner} has no argument {name!r}{_nearest(name, allowed)}")


def check_seconds(name: str, value: object) -> None:
    """Refuse a `value` that is not a positive and finite number.

    Raises:
        ConfigError: The value is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")


def check_no_password(name: str, address: object, fix: str) -> None:
    """Refuse an `address` with a user or a password before its host: arguments are pickled with the task.

    Args:
        name: What the error names.
        address: The value.
        fix: What to do instead, as a part of a sentence.

    Raises:
        ConfigError: It has one.
    """
    if isinstance(address, str) and has_credentials(address):
        raise ConfigError(f"{name} holds a password, which would be pickled with the task: {fix}")


def check_flag(name: str, value: object) -> None:
    """Refuse a `value` that is neither True nor False.

    Raises:
        ConfigError: The value is anything else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def is_given(value: object) -> bool:
    """Whether an argument has a value: None is none, nor is a string without characters, as scripts' defaults are."""
    return value is not None and not (isinstance(value, str) and not value.strip())


def check_text(name: str, value: object, is_optional: bool = True) -> None:
    """Refuse a `value` that is not a non-empty string, except for None if it `is_optional`.

    Raises:
        ConfigError: The value is anything else.
    """
    if value is None and is_optional:
        return
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} must be a non-empty string, got {value!r}")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{name} contains a null character or half of a surrogate pair: {value[:80]!r}")


def check_name(name: str, value: object, longest: int = 500) -> None:
    """Refuse a `value` that is neither None nor a string that a service takes as a name.

    Raises:
        ConfigError: The value is anything else.
    """
    check_text(name, value)
    if isinstance(value, str) and len(value) > longest:
        raise ConfigError(f"{name} has {len(value)} characters, and at most {longest} can be used: {value[:40]!r}...")


def check_run_id(name: str, value: object, longest: int = 100) -> None:
    """Refuse a `value` that is neither None nor a string that can be a run's id, and so a part of a file's name.

    Raises:
        ConfigError: The value is anything else.
    """
    check_name(name, value, longest)  # services take 128, and the ids of ranks have a suffix
    if isinstance(value, str) and (re.search(r"[/\\\x00-\x1f\x7f-\x9f\u2028\u2029]", value) or value.strip(".") == ""):
        raise ConfigError(f"{name}={value!r} cannot be a run id: use letters, digits, '-', '_' and '.'")


def check_texts(name: str, values: object) -> tuple[str, ...] | None:
    """Return the strings in `values` as a tuple; None for None.

    Raises:
        ConfigError: `values` is not a sequence of non-empty strings.
    """
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{name} must be a sequence of strings, got {values!r}")
    texts = tuple(values)
    for text in texts:
        check_text(f"each entry of {name}", text)
    return texts


def _nearest(value: object, allowed: Collection[str]) -> str:
    import difflib  # only if there is a mistake

    close = difflib.get_close_matches(str(value), allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
