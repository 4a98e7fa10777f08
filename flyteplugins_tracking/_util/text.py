"""Strings of other packages, and addresses, made fit to be shown and stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

# All but tabs and line ends: a terminal obeys some of them. And what UTF-8 cannot encode, which no service takes.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# pydantic's errors: how many, the field and what is wrong with it, and the value.
_VALIDATION = re.compile(r"\d+ validation errors? for [^\n]*\n(.*?) \[type=", re.DOTALL)
# The most characters of a JSON string: the stacks of a process have less.
_LONGEST_JSON = 1 << 22
# The most digits of its integers, and its largest number: the product of two is a number still.
_MOST_DIGITS = 18
_LARGEST = 1e100
# A user, such as a mail address, with a password that may have any character, as those of databases and of careless
# users have; or a token. Not an @ in a path.
CREDENTIALS = re.compile(r"(?<=://)(?:[^/:]*:.*@|(?:[^/\s@]*@)+)", re.DOTALL)


def printable(text: str) -> str:
    """Return a string of another process without characters that a terminal obeys or that cannot be written."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def parse_json(text: str) -> Any:
    """Return the value of the JSON that another process has written.

    Raises:
        ValueError: It is not JSON, is too long or nested too deeply, or has a number that is too large to count with.
    """
    if len(text) > _LONGEST_JSON:
        raise ValueError(f"a message has {len(text)} characters")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_number)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    if not abs(number := float(digits)) < _LARGEST:
        raise ValueError(f"{digits[:20]} is too large, or no number")
    return number


def in_words(kind: str, numbers: Sequence[int]) -> str:
    """Return numbers in words, runs of them as a range, and at most eight of these: "ranks 0-2, 5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [f"{group[0]}-{group[-1]}" if len(group) > 2 else ", ".join(map(str, group)) for group in ranges]
    if len(texts) > 8:
        texts[8:] = ["..."]
    return f"{kind}{'' if len(numbers) == 1 else 's'} {', '.join(texts)}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as a list in words: the first `most` of them, and how many more there are."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return ", ".join([*map(printable, names[:most]), *more])


def digest(*parts: object, length: int = 8) -> str:
    """Return a short name for these values, the same in each process."""
    import hashlib  # a rank without a run does without

    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:length]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those that it comes from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, without its full stop; the name of its type if it has no text.

    Of pydantic's errors, the first reason: it follows a line that only counts them.
    """
    text = str(error).strip()
    if found := _VALIDATION.match(text):
        text = " ".join(found[1].split())
    lines = text.splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def without_credentials(address: str) -> str:
    """Return an address without user, password, query and fragment, so that it can be shown and stored."""
    return re.split(r"[?#]", CREDENTIALS.sub("", address.strip()), maxsplit=1)[0].rstrip("/")


def has_credentials(address: str) -> bool:
    """Whether an address has a user or a password before its host."""
    return CREDENTIALS.search(address) is not None
