"""Pluto's service over HTTP: one request at a time, each with a limit."""

from __future__ import annotations

import functools
import logging
from typing import Any

from flyteplugins_tracking.trackers.outbox import THREAD
from flyteplugins_tracking.trackers.pluto import vendor

# The longest time for one request, in seconds. The client's own limit of 32 s is longer than a run's end waits.
REQUEST_S = 10.0
_SHORTEST_S = 0.1
_NDJSON, _JSON = "application/x-ndjson", "application/json"


class Service:
    """The service of a client's settings, with the user's proxy and certificates."""

    def __init__(self, settings: Any) -> None:
        import httpx

        _quiet_requests()
        self._settings = settings
        proxy = settings.http_proxy or settings.https_proxy or None
        self._client = httpx.Client(verify=not settings.insecure_disable_ssl, proxy=proxy)

    def post(self, path: str, content: str, timeout_s: float = REQUEST_S) -> Any:
        """Post to a path of the API, or of the ingest server. Returns the answer. Raises what `httpx` raises."""
        is_ingest = path.startswith("/ingest/")
        server = self._settings.url_ingest if is_ingest or path == "/step" else self._settings.url_api
        headers = {**vendor.request_headers(self._settings), "Content-Type": _NDJSON if is_ingest else _JSON}
        limit_s = max(_SHORTEST_S, min(REQUEST_S, timeout_s))
        return self._client.post(f"{server}{path}", content=content.encode(), headers=headers, timeout=limit_s)


@functools.cache
def _quiet_requests() -> None:
    """Keep the requests of our thread out of the user's log, as the client does with its own."""
    logging.getLogger("httpx").addFilter(lambda record: record.threadName != THREAD)
