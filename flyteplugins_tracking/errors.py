"""What this library raises.

```
TrackingError                  catch this one to catch them all
├── TopologyError              the launcher's variables are malformed or contradict each other
├── IdentityError              the ranks have no run id that they agree on
├── ConfigError                an argument that cannot work; raised at decoration where it can be
├── TrackerUnavailableError    the tracking service, or the key for it, is not there
└── TrackerNotInstalledError   the tracker's own package is missing; the text is the command to run
```
"""

from __future__ import annotations


class TrackingError(Exception):
    """The base of everything that this library raises."""


class TopologyError(TrackingError):
    """The launcher's variables are malformed or contradict each other.

    Nobody becomes rank 0 by default: a wrong rank 0 is silent, this is not.
    """


class IdentityError(TrackingError):
    """The ranks of this job have no run id that they agree on."""


class ConfigError(TrackingError):
    """An argument that cannot work."""


class TrackerUnavailableError(TrackingError):
    """The tracking service cannot be used: unreachable, or no (valid) key for it.

    Attributes:
        reason: What is wrong, and how to fix it.
        alternative: How to do without the service, as a part of a sentence. Not for one who does so already.
    """

    def __init__(self, reason: str, alternative: str = "") -> None:
        super().__init__(reason, alternative)
        self.reason = reason
        self.alternative = alternative

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}; or {self.alternative}." if self.alternative else self.reason


class TrackerNotInstalledError(TrackingError):
    """The tracker's own package is not installed."""
