"""Strings that leave this process: without the keys that this process knows."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from flyteplugins_tracking._util.proc import environment
from flyteplugins_tracking._util.text import CREDENTIALS

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# A shorter value may be an ordinary word.
_SHORTEST = 8
_HIDDEN = "***"
_ADDRESSES = (
    # A user and a password, or a token, in an address. Other text may follow: digits are a port, and no password, if no
    # @ is in the same word. Longer ones are not looked for: the time would grow with the square of a line.
    (
        re.compile(r"(?<=://)[^\s/:]{0,300}:(?!\d+(?:[/?#][^\s@]*)?(?:\s|$))[^\n\"'<>]{0,300}@"),
        f"{_HIDDEN}@",
    ),
    (re.compile(r"(?<=://)(?:[^/\s@]*@)+"), f"{_HIDDEN}@"),
)
_FORMS = (
    # `api_key=...`, `"token": "..."`, `Authorization: Bearer ...`
    (
        re.compile(
            r"((?:key|token|secret|password|passwd|authorization)[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s\"',;)&]{8,}",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    # The API keys of W&B, Hugging Face, OpenAI, AWS and GitHub.
    (
        re.compile(
            r"\b(?:wandb_v1_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_\w{30,}|[0-9a-f]{40})\b"
        ),
        _HIDDEN,
    ),
)


# The keys that this process was given by other ways than its environment.
_known: set[str] = set()


def learn(key: str) -> None:
    """Have `masked` replace this key from now on."""
    if len(key.strip()) >= _SHORTEST:
        _known.add(key.strip())


def is_secret_name(name: str) -> bool:
    """Whether a value of this name may be a key: of a variable, or of a config."""
    return _SECRET_NAME.search(name) is not None


def masked(text: str, *, with_forms: bool = True) -> str:
    """Return `text` without keys: those that this process has learnt or has in its environment, and in addresses.

    Args:
        text: The text.
        with_forms: Whether what has the form of a key is masked too, as in `api_key: ...`. False for the library's own
            sentences.
    """
    # A key with a line end around it is printed without that.
    variables = environment()
    keys = {value.strip() for name, value in variables.items() if is_secret_name(name)}
    values = {key for key in keys if len(key) >= _SHORTEST}
    for value in variables.values():
        found = CREDENTIALS.search(value)
        password = (found[0][:-1].partition(":")[2] or found[0][:-1]) if found else ""
        values |= {form for form in (password, unquote(password)) if len(form) >= _SHORTEST}
    # A key of several lines may be printed in part.
    lines = {line for value in values | _known for line in (value, *map(str.strip, value.splitlines()))}
    printed = {
        form for value in lines if len(value) >= _SHORTEST for form in (value, quote(value, safe=""), repr(value)[1:-1])
    }
    for value in sorted(printed, key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    for pattern, hidden in (*_ADDRESSES, *_FORMS) if with_forms else _ADDRESSES:
        text = pattern.sub(hidden, text)
    return text
