"""Texts that leave this process: without the keys that this process knows."""

from __future__ import annotations

import os
import re

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# A shorter value may be an ordinary word.
_SHORTEST = 8
_HIDDEN = "***"
_PATTERNS = (
    # A user and a password in an address.
    (re.compile(r"(?<=://)[^/\s@]+@"), f"{_HIDDEN}@"),
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


def masked(text: str, known: tuple[str, ...] = ()) -> str:
    """Return `text` without keys: those that the environment has, those of known forms, and `known`."""
    values = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST]
    for value in sorted({*values, *known}, key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    for pattern, hidden in _PATTERNS:
        text = pattern.sub(hidden, text)
    return text
