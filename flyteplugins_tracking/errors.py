"""The exceptions of this library.

```
TrackingError                  the base of all: catch this to catch every one
├── TopologyError              the launcher's variables are malformed or contradict each other
├── IdentityError              the ranks cannot agree on a run id
├── ConfigError                an argument is invalid; raised at decoration if possible
├── TrackerUnavailableError    the tracking service cannot be used: it does not answer, or refuses
└── TrackerNotInstalledError   the tracker's own package is missing; the message has the command to run
```
"""

from __future__ import annotations


class TrackingError(Exception):
    """The base of all exceptions of this library. Its text shows no key that this process has, and no password."""

    def __init__(self, *texts: str) -> None:
        from flyteplugins_tracking._util.secrets import masked

        super().__init__(*(masked(str(text), with_forms=False) for text in texts))


class TopologyError(TrackingError):
    """The launcher's variables are malformed or contradict each other.

    No process takes itself for rank 0 then: a wrong rank 0 would go unnoticed.
    """


class IdentityError(TrackingError):
    """The ranks of this job cannot agree on a run id."""


class ConfigError(TrackingError):
    """An argument is invalid."""


class TrackerUnavailableError(TrackingError):
    """The tracking service cannot be used: it does not answer, it refuses, or there is no key for it.

    Attributes:
        reason: The problem, and how to fix it.
        alternative: How to do without the service, as a part of a sentence. Empty if the user does so already.
        is_outage: Whether it passes by itself: no network, no answer, an error of the server's, a full quota. Such a
            run is logged to local files with `if_unavailable="degrade"`. A missing key and a refusal are always errors.
    """

    def __init__(self, reason: str, alternative: str = "", *, is_outage: bool = True) -> None:
        super().__init__(reason, alternative)
        self.reason, self.alternative = self.args
        self.is_outage = is_outage

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}; or {self.alternative}." if self.alternative else self.reason


class TrackerNotInstalledError(TrackingError):
    """The tracker's own package is not installed."""
