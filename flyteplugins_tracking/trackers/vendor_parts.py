"""The private names of vendors' clients: which ones are used, what for, and what happens without each.

Each tracker that needs such names has one module for them, `vendor.py`. A version of the client that lacks one costs a
feature, with one warning, or is refused with one error that says which versions work. Names that can be looked up
before a run is opened are a table of `Part`s. Those that only show when they are used, because objects have them or
their signature counts, stand in the body of `VendorParts.optional` or `VendorParts.required`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from flyteplugins_tracking._util.modules import installed_version
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.errors import TrackerNotInstalledError
from flyteplugins_tracking.trackers.diagnostics import Diagnostic

logger = logging.getLogger(__name__)
# What a missing module, a missing attribute and a changed signature raise.
CHANGED = (ImportError, AttributeError, TypeError)


class Fault(NamedTuple):
    """A fault of some versions of a client.

    Attributes:
        first: The first version that has it.
        fixed: The first later version without it.
        text: What happens.
    """

    first: str
    fixed: str
    text: str


# By distribution. Each was seen in a real run with this library.
FAULTS: Mapping[str, Sequence[Fault]] = {
    "wandb": (
        # https://github.com/wandb/wandb/pull/11249
        Fault("0.24.0", "0.24.1", "rows may be missing at the service after it was slow, without an error"),
        # https://github.com/wandb/wandb/issues/12079
        Fault("0.25.1", "0.28.1", "after wandb.Api() was used, forked processes may hang, as workers of a DataLoader"),
        # https://github.com/wandb/wandb/issues/11758
        Fault("0.26.0", "0.26.1", "with protobuf 6 before 6.32.1, it cannot be imported"),
        # Its scan of a run's rows ends where 1,000 steps in a row are of others.
        Fault("0.27.0", "0.28.0", "in a run with several writers, rows of one that was killed may be there twice"),
    ),
}


@dataclass(frozen=True)
class Part:
    """A name of a vendor's client that its documentation does not promise.

    Attributes:
        path: `module:name` or `module:Class.name`. An attribute that only instances have is `object.name`, with a word
            for the object that the tracker's `vendor.py` chooses.
        use: What the name is for.
        loss: The feature that is lost without it. Empty if no run can be opened without it.
        since: The first version of the client that has it. Empty if all have it that the extra allows.
    """

    path: str
    use: str
    loss: str = ""
    since: str = ""

    @property
    def is_static(self) -> bool:
        """Whether the name can be looked up without an object."""
        return ":" in self.path


class VendorParts:
    """The private names that one tracker uses.

    Attributes:
        requirement: The client's version that was tested, as `pip install` takes it.
        parts: The names, by their paths.
        later: What the oldest versions cannot do, and the first version that can: features without a name of their
            own, and those of parts with `since`.
    """

    def __init__(
        self, title: str, requirement: str, parts: Sequence[Part] = (), later: Mapping[str, str] | None = None
    ) -> None:
        self.requirement = requirement
        self.later = {**(later or {}), **{part.loss: part.since for part in parts if part.since}}
        self.parts = {part.path: part for part in parts}
        self._title = title
        self._warn_once = WarnOnce(logger)

    def require(self) -> None:
        """Look up the names without which no run can be opened.

        Raises:
            TrackerNotInstalledError: The installed version lacks one of them.
        """
        for part in self._required():
            try:
                _value(part) if part.is_static else None
            except (ImportError, AttributeError) as error:
                raise self._not_importable(error) or self._error(part) from error

    def require_of(self, kind: str, vendor_object: Any) -> None:
        """Look up the names that `vendor_object` must have, which the table calls `kind`.

        Raises:
            TrackerNotInstalledError: It lacks one of them.
        """
        for part in self._required():
            owner, _, name = part.path.partition(".")
            if not part.is_static and owner == kind and not hasattr(vendor_object, name):
                raise self._error(part)

    def get(self, path: str, vendor_object: Any = None) -> Any:
        """Return what an optional name is. Returns None if it is not there, and warns once that its feature is lost.

        Args:
            path: The name's path in the table.
            vendor_object: The object that should have it, unless the path begins with a module.
        """
        part = self.parts[path]
        try:
            return _value(part) if part.is_static else getattr(vendor_object, path.partition(".")[2])
        except (ImportError, AttributeError) as error:
            self._warn(path, f"lost: {part.loss}", f"{self._absence(part)} ({error})", self._fix(part.loss))
            return None

    def losses(self, version: str) -> list[str]:
        """Return what this version of the client cannot do."""
        return [ability for ability, first in self.later.items() if numbers(version) < numbers(first)]

    def limits(self) -> Iterator[Diagnostic]:
        """Yield what is known of the installed version: what it cannot do, and that it was not tested yet."""
        installed = self._version()
        for ability in self.losses(installed) if installed else ():
            yield Diagnostic("note", f"{self._title}: {self._installed()} is limited ({ability})", self._fix(ability))
        if numbers(installed) > numbers(self.requirement.partition("==")[2]):
            text = f"{self._title}: {self._installed()} is newer than {self.requirement}, which was tested"
            yield Diagnostic("note", text)

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
            not_importable = self._not_importable(error)
            if not_importable is not None:
                raise not_importable from error
            cause = f"{self._installed()} does not support {feature} ({error})"
            raise TrackerNotInstalledError(f"{self._title}: {cause}. {self._fix(feature)}") from error

    def lose(self, consequence: str, cause: object) -> None:
        """Warn once that the client lacks an optional part, for which `cause` is the reason."""
        cause = f"{self._installed()} lacks what is needed here ({cause})"
        self._warn(consequence, consequence, cause, self._fix(consequence))

    def _warn(self, key: str, consequence: str, cause: str, fix: str) -> None:
        self._warn_once(key, "%s: %s. %s. %s", self._title, consequence, cause, fix)

    def _required(self) -> Iterator[Part]:
        return (part for part in self.parts.values() if not part.loss)

    def _error(self, part: Part) -> TrackerNotInstalledError:
        return TrackerNotInstalledError(
            f"{self._title}: {self._absence(part)}, which is needed: {part.use}. {self._fix()}"
        )

    def _not_importable(self, error: Exception) -> TrackerNotInstalledError | None:
        """Return the error to raise if a package that the client needs is the cause; None if it is the client's own."""
        package = self._distribution.partition("-")[0]  # as in pluto-ml
        is_own = package in sys.modules and (getattr(error, "name", None) or "").partition(".")[0] == package
        if not isinstance(error, ImportError) or is_own:
            return None
        text = f"{self._title}: {self._installed()} cannot be imported: {type(error).__name__}: {error}"
        return TrackerNotInstalledError(f"{text}. See which packages are missing or do not fit together: pip check")

    def _absence(self, part: Part) -> str:
        return f"{self._installed()} has no {part.path.replace(':', '.')}"

    def _installed(self) -> str:
        return f"{self._distribution} {self._version()}".rstrip()

    def _version(self) -> str:
        return installed_version(self._distribution, f"{self._distribution}-skinny") or ""  # mlflow-skinny is enough

    @property
    def _distribution(self) -> str:
        return self.requirement.partition("=")[0]

    def _fix(self, ability: str = "") -> str:
        first = self.later.get(ability)
        if first:
            return f'Version {first} and later ones can: pip install "{self._distribution}>={first}"'
        return f'Install a version that was tested: pip install "{self.requirement}"'


def known_faults(distribution: str) -> Iterator[Diagnostic]:
    """Yield a warning for each known fault of the installed version."""
    version = (installed_version(distribution) or "") if distribution in FAULTS else ""
    for fault in FAULTS[distribution] if version else ():
        if numbers(fault.first) <= numbers(version) < numbers(fault.fixed):
            fix = f'pip install "{distribution}>={fault.fixed}"'
            yield Diagnostic("warning", f"{distribution} {version} has a known fault: {fault.text}", fix)


def _value(part: Part) -> Any:
    module, _, names = part.path.partition(":")
    return attrgetter(names)(import_module(module))


def numbers(version: str) -> list[int]:
    """Return a version's numbers, which can be compared."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
