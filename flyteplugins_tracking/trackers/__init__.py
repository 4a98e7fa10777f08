"""The tracking services, and the public names that a tracker of a third party needs: those in `__all__`.

In the room: the arguments of `tracking_init`, which a tracker gets (`config`), the interface of a tracker (`base`), the
search for one by its name (`registry`), a base for clients that send rows (`client`, `rows`), whether a run takes rows
(`gate`), how they reach a service that may be away (`outbox`, over `journal`; `kept`), how the rank that ends a run
waits for the others (`barrier`), how long an end may last (`ending`), the doctor's questions to a service
(`diagnostics`), and a folder for each service.
May enter: code that speaks to a service, and arguments that do not depend on it. Must not: Flyte, and code that
concerns no service. A folder of one service does not import another's, and a vendor's package is imported inside
functions only.
It may import `errors`, `_util`, `_rank` and `_job`.
"""

from typing import TYPE_CHECKING

from flyteplugins_tracking._util.modules import loaded_on_use

__all__ = [
    "ClientHandle",
    "Diagnosis",
    "Diagnostic",
    "Feature",
    "Handle",
    "Page",
    "RunRequest",
    "Tracker",
    "TrackingConfig",
    "open_or_keep",
    "run_config",
]

# They are loaded on first use: a rank without a run needs neither `client` nor `journal`.
if TYPE_CHECKING:
    from flyteplugins_tracking._rank.plan import Page
    from flyteplugins_tracking.trackers.base import Feature, Handle, RunRequest, Tracker
    from flyteplugins_tracking.trackers.client import ClientHandle, run_config
    from flyteplugins_tracking.trackers.config import TrackingConfig
    from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
    from flyteplugins_tracking.trackers.kept import open_or_keep
else:  # without the `else`, a type checker would accept every misspelt name
    _MODULES = {
        "trackers.config": ("TrackingConfig",),
        "_rank.plan": ("Page",),
        "trackers.base": ("Feature", "Handle", "RunRequest", "Tracker"),
        "trackers.client": ("ClientHandle", "run_config"),
        "trackers.diagnostics": ("Diagnosis", "Diagnostic"),
        "trackers.kept": ("open_or_keep",),
    }
    __getattr__, __dir__ = loaded_on_use(globals(), _MODULES)
