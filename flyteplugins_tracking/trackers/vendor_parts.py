"""The private names of vendors' clients: which ones are used, what for, and what happens without each.

Each tracker that needs such names has one module for them, `vendor.py`. A version of the client that lacks one costs a
feature, with one warning, or is refused with one error that says which versions work. Names that can be looked up
before a run is opened are a table of `Part`s. Those that only show when they are used, because objects have them or
their signature counts, stand in the body of `VendorParts.optional` or `VendorParts.required`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerNotInstalledError

logger = logging.getLogger(__name__)
# What a missing module, a missing attribute and a changed signature raise.
CHANGED = (ImportError, AttributeError, TypeError)


@dataclass(frozen=True)
class Part:
    """A name of a vendor's client that its documentation does not promise.

    Attributes:
        path: `module:name` or `module:Class.name`. An attribute that only instances have is `object.name`, with a word
            for the object that the tracker's `vendor.py` chooses.
        use: What the name is for.
        loss: The feature that is lost without it. Empty if no run can be opened without it.
    """

    path: str
    use: str
    loss: str = ""

    @property
    def is_static(self) -> bool:
        """Whether the name can be looked up without an object."""
        return ":" in self.path


class VendorParts:
    """The private names that one tracker uses.

    Attributes:
        requirement: The client's versions that were tested, as `pip install` takes them.
        parts: The names, by their paths.
    """

    def __init__(self, title: str, requirement: str, parts: Sequence[Part] = ()) -> None:
        self.requirement = requirement
        self.parts = {part.path: part for part in parts}
        self._title = title
        self._warn_once = WarnOnce(logger)

    def require(self) -> None:
        """Look up the names without which no run can be opened.

        Raises:
            TrackerNotInstalledError: The installed version lacks one of them.
        """
        for part in self._required():
            if part.is_static and not _is_there(part):
                raise self._error(part)

    def require_of(self, kind: str, vendor_object: Any) -> None:
        """Look up the names that `vendor_object` must have, which the table calls `kind`.

        Raises:
            TrackerNotInstalledError: It lacks one of them.
        """
        for part in self._required():
            owner, _, name = part.path.partition(".")
            if not part.is_static and owner == kind and not hasattr(vendor_object, name):
                raise self._error(part)

    def has(self, path: str, vendor_object: Any = None) -> bool:
        """Whether an optional name is there. If not, warns once that its feature is lost.

        Args:
            path: The name's path in the table.
            vendor_object: The object that should have it, unless the path begins with a module.
        """
        part = self.parts[path]
        is_there = _is_there(part) if part.is_static else hasattr(vendor_object, path.partition(".")[2])
        if not is_there:
            self._warn(path, f"lost: {part.loss}", self._absence(part))
        return is_there

    @contextmanager
    def optional(self, consequence: str) -> Iterator[None]:
        """Leave the body if the client lacks a part of it, with one warning that says the `consequence`."""
        try:
            yield
        except CHANGED as error:
            self.lose(consequence, error)

    @contextmanager
    def required(self, feature: str) -> Iterator[None]:
        """Raise one clear error if the client lacks a part that the body, and so `feature`, needs.

        Raises:
            TrackerNotInstalledError: That.
        """
        try:
            yield
        except CHANGED as error:
            cause = f"{self._installed()} does not support {feature} ({error})"
            raise TrackerNotInstalledError(f"{self._title}: {cause}. {self._fix()}") from error

    def lose(self, consequence: str, cause: object) -> None:
        """Warn once that the client lacks an optional part, for which `cause` is the reason."""
        self._warn(consequence, consequence, f"{self._installed()} lacks what is needed here ({cause})")

    def _warn(self, key: str, consequence: str, cause: str) -> None:
        self._warn_once(key, "%s: %s. %s. %s", self._title, consequence, cause, self._fix())

    def _required(self) -> Iterator[Part]:
        return (part for part in self.parts.values() if not part.loss)

    def _error(self, part: Part) -> TrackerNotInstalledError:
        return TrackerNotInstalledError(
            f"{self._title}: {self._absence(part)}, which is needed: {part.use}. {self._fix()}"
        )

    def _absence(self, part: Part) -> str:
        return f"{self._installed()} has no {part.path.replace(':', '.')}"

    def _installed(self) -> str:
        from importlib.metadata import PackageNotFoundError, version

        distribution = self.requirement.partition(">")[0]
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            return distribution

    def _fix(self) -> str:
        return f'Install a version that was tested: pip install "{self.requirement}"'


def _is_there(part: Part) -> bool:
    module, _, names = part.path.partition(":")
    try:
        value: Any = import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return False
    return True
