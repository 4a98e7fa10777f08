"""The private names of vendors' clients, and which versions of the clients work.

Each tracker that needs such names has one module for them, `vendor.py`, whose functions use them in the body of
`VendorParts.optional` or `VendorParts.required`. A version of the client that lacks one costs a feature, with one
warning, or is refused with one error that says which version works.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


# What `pip install` takes, by the package: the extras have it too. Older versions are refused.
MINIMUMS = {"wandb": "wandb>=0.22.1", "pluto": "pluto-ml>=0.0.26", "mlflow": "mlflow>=2.10", "trackio": "trackio>=0.30"}
# By package. Each was seen in a real run with this library.
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
        Fault("0.27.0", "0.28.0", "wandb.init waits without a limit for a service that does not answer"),
    ),
}


class VendorParts:
    """The private names that one tracker uses.

    Attributes:
        tested: The client's version that was tested, as `pip install` takes it.
    """

    def __init__(self, title: str, package: str, tested: str) -> None:
        self.tested = tested
        self._title, self._package = title, package
        self._warn_once = WarnOnce(logger)

    @contextmanager
    def optional(self, consequence: str) -> Iterator[None]:
        """Leave the body if the client lacks a part of it, with one warning that says the `consequence`."""
        try:
            yield
        except CHANGED as error:
            self.lose(consequence, error)

    def lose(self, consequence: str, cause: object) -> None:
        """Warn once that the client lacks an optional part, for which `cause` is the reason."""
        text = "%s: %s. %s lacks what is needed here (%s). %s"
        self._warn_once(consequence, text, self._title, consequence, self._installed(), cause, self._fix())

    def require(self, target: Any, *names: str) -> None:
        """Raise one clear error if an object, or the module of this name, lacks a name that every run needs.

        Raises:
            TrackerNotInstalledError: That.
        """
        with self.required():
            owner = import_module(target) if isinstance(target, str) else target
            for name in names:
                attrgetter(name)(owner)

    @contextmanager
    def required(self, feature: str = "this version of flyteplugins-tracking") -> Iterator[None]:
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
            raise TrackerNotInstalledError(f"{self._title}: {cause}. {self._fix()}") from error

    def _not_importable(self, error: Exception) -> TrackerNotInstalledError | None:
        """Return the error to raise if a package that the client needs is the cause; None if it is the client's own."""
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        is_own = missing == self._package and missing in sys.modules
        if not isinstance(error, ImportError) or is_own:
            return None
        text = f"{self._title}: {self._installed()} cannot be imported: {type(error).__name__}: {error}"
        return TrackerNotInstalledError(f"{text}. See which packages are missing or do not fit together: pip check")

    def _installed(self) -> str:
        return f"{self.tested.partition('==')[0]} {client_version(self._package)}".rstrip()

    def _fix(self) -> str:
        return f'Install a version that was tested: pip install "{self.tested}"'


def client_version(package: str) -> str:
    """Return the installed version of a vendor's client; "" if it is unknown."""
    return installed_version(package, f"{package}-ml", f"{package}-skinny") or ""  # pluto-ml; mlflow-skinny is enough


def known_faults(package: str) -> Iterator[Diagnostic]:
    """Yield an error if the installed version of a client is too old, and a warning for each of its known faults."""
    minimum = MINIMUMS.get(package, "")
    version = client_version(package) if minimum else ""
    if not version:
        return
    distribution, _, oldest = minimum.partition(">=")
    if numbers(version) < numbers(oldest):
        yield Diagnostic("error", f"{distribution} {version} is too old", f'pip install "{minimum}"')
    for fault in FAULTS.get(package, ()):
        if numbers(fault.first) <= numbers(version) < numbers(fault.fixed):
            fix = f'pip install "{distribution}>={fault.fixed}"'
            yield Diagnostic("warning", f"{distribution} {version} has a known fault: {fault.text}", fix)


def numbers(version: str) -> list[int]:
    """Return a version's numbers, which can be compared."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
