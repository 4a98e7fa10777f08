"""A clear error for pickles of an older version: they import modules that this version does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from flyteplugins_tracking.errors import ConfigError


class _Moved:
    """A finder for imports, behind all others: it is called only if the module does not exist."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:  # noqa: ARG002 the protocol
        if name in self._names:
            _refuse(name)


def refuse_imports_of(names: Iterable[str]) -> None:
    """Make imports of modules that an older version had fail with an error that says what to do.

    Flyte and Elastic pickle a decorated function with the names of this package's modules.
    """
    sys.meta_path.append(_Moved(names))


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"{name} does not exist in this version of flyteplugins-tracking. If a task is being loaded, it was serialized "
        "with an older version: register it again with the version that is installed here, or install that older "
        "version here."
    )
