"""Pluto (`pluto-ml`). The vendor's package is imported when a run is opened, and only then."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking._util.checks import check_no_password, check_text
from flyteplugins_tracking._util.record import replace
from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import ConfigError
from flyteplugins_tracking.trackers import diagnostics
from flyteplugins_tracking.trackers.base import Handle, RunRequest, Tracker
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.idle import keep_idle

# The parameters of pluto.init that the decorator does not take by name, and that do not choose a run. A test compares.
INIT_ARGUMENTS = frozenset({"dir", "settings", "fork_run_id", "fork_step", "inherit_config", "inherit_tags"})
# Our own argument, for links: only the server knows the organization of a key.
_ORGANIZATION = "organization"
_APP = "https://pluto.trainy.ai"
# https://github.com/Trainy-ai/pluto, _DEFAULT_URL_API of version 0.0.29.
_API = "https://pluto-api.trainy.ai"
# The settings with the addresses of the client's servers.
_URLS = ("url_app", "url_api", "url_ingest", "url_py")


class PlutoTracker(Tracker):
    """Opens Pluto runs."""

    name = "pluto"
    title = "Pluto"
    package = "pluto"
    distribution = '"flyteplugins-tracking[pluto]"'
    run_id_variables = ("PLUTO_RUN_ID", "MLOP_RUN_ID")
    arguments = INIT_ARGUMENTS | {_ORGANIZATION}
    unsupported = {  # noqa: RUF012 as the protocol has it
        "sweeps": "pluto.sweep and pluto.agent run trials by themselves, in one process",
        "config file": "it reads none. Pass config= as a mapping",
        "download_logs": "its files are removed when they have been sent",
    }

    def check(self, config: TrackingConfig) -> None:
        _check_id(config.id, "id")
        check_text(_ORGANIZATION, config.options.get(_ORGANIZATION))
        if (config.options.get("fork_run_id") is None) != (config.options.get("fork_step") is None):
            raise ConfigError("fork_run_id= and fork_step= go together: pass both or neither")
        settings = config.options.get("settings")
        if settings is None:
            return
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings= must be a mapping, which can be pickled; got {type(settings).__name__}")
        if settings.get("_auth"):
            raise ConfigError(
                "settings= holds an API key, which would be pickled with the task: pass secret=... instead"
            )
        for name in ("host", *_URLS):
            check_text(f"settings[{name!r}]", settings.get(name))
        for name, value in settings.items():
            variable = f"{'' if 'proxy' in name else 'PLUTO_'}{name.upper()}"
            check_no_password(f"settings[{name!r}]", value, f"set {variable} where the task runs")

    def page(self, config: TrackingConfig, page: Page | None) -> str:  # noqa: ARG002 no page has an address with our ids
        """Return the project's page, or the host.

        A run's page has an id that the server makes. The project's page has the organization's name.
        """
        host, organization = _app(config), config.options.get(_ORGANIZATION)
        if not organization:
            return host
        address = f"{host}/o/{quote(organization, safe='{}')}"
        return f"{address}/projects/{quote(config.project, safe='{}')}" if config.project else address

    def export_run(self, run: Any) -> Mapping[str, Any] | None:
        from flyteplugins_tracking.trackers.client import Run

        if isinstance(run, Run) or run.id is None:
            return None  # the run is in local files, or nowhere
        return {"id": run.run_id, "project": run.settings.project}

    def on_inactive_rank(self, config: TrackingConfig, info: DistributedInfo | None) -> Callable[[], object]:
        return keep_idle(self.name, config, info)

    def diagnose(self) -> Diagnosis:
        servers = {name: _variable(name) for name in ("url_app", "url_api", "url_ingest", "url_py")}
        address, folder = without_credentials(servers["url_api"] or _API), _variable("dir") or os.curdir
        key = diagnostics.find_key("PLUTO_API_KEY", "MLOP_API_TOKEN", elsewhere=dict([stored_key()]))
        text, fix = f"Pluto keeps its files in {folder}", "export PLUTO_DIR=/a/directory"
        problems = list(diagnostics.check_directory(folder, "error", text, fix))
        if key is None:
            text = "there is no API key: PLUTO_API_KEY is not set, and `pluto login` has not stored a key in a file"
            fix = "pluto login, or export PLUTO_API_KEY=..., or secret= of tracking_init"
            problems.append(Diagnostic("error", f"Pluto: {text}", fix))
        missing = [f"PLUTO_{name.upper()}" for name, value in servers.items() if not value]
        if missing and len(missing) < len(servers):
            text = f"{', '.join(missing)} not set, but the others are: a part of each run goes to Pluto's own servers"
            fix = f"export {' '.join(f'{name}=...' for name in missing)}"
            problems.append(Diagnostic("error", f"Pluto: {text}", fix))
        return Diagnosis(
            place=address,
            credentials=key,
            is_chosen=key is not None or any(servers.values()),
            # The client's first request: it asks for the key's owner.
            reach=diagnostics.server("a Pluto", f"{address}/api/slug", "(200|400|401|403) ", data=b""),
            diagnostics=tuple(problems),
        )

    def open(self, request: RunRequest) -> Handle:
        # Imported here, so that a rank without a run does not load it.
        from flyteplugins_tracking.trackers.client import ended_if_interrupted
        from flyteplugins_tracking.trackers.kept import open_or_keep
        from flyteplugins_tracking.trackers.pluto.open import end_op, open_op
        from flyteplugins_tracking.trackers.pluto.run import PlutoHandle

        request = _with_usable_id(request)

        def open_run() -> PlutoHandle:
            op, queue = open_op(request)
            with ended_if_interrupted(request, lambda exit_code, _: end_op(op, request, exit_code)):
                return PlutoHandle(request, self, op, queue)

        return open_or_keep(request, self, open_run)


def stored_key() -> tuple[str, str | None]:
    """Return the file in which `pluto login` stores a key on Linux, and the key."""
    import base64  # few ranks need it

    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    file = os.path.join(data, "python_keyring", "keyring_pass.cfg")
    with suppress(ValueError):
        key = base64.decodebytes(diagnostics.settings_of(file, "pluto").get("pluto", "").encode()).decode()
        return file, key or None
    return file, None


def _app(config: TrackingConfig) -> str:
    """Return the address of the service's web pages."""
    settings = config.options.get("settings") or {}
    if settings.get("host"):
        return f"http://{settings['host']}:3000"
    variable = os.environ.get("PLUTO_URL_APP") or os.environ.get("MLOP_URL_APP")
    return str(settings.get("url_app") or variable or _APP).rstrip("/")


def _variable(name: str) -> str | None:
    """Return the client's setting of this name that a variable has."""
    return os.environ.get(f"PLUTO_{name.upper()}") or os.environ.get(f"MLOP_{name.upper()}")


def _check_id(run_id: str | None, argument: str) -> None:
    if run_id is None:
        return
    if _is_made_by_server(run_id):
        raise ConfigError(
            f"{argument}={run_id!r} looks like an id that Pluto's server made: digits, or a string like 'ABC-1'. Pluto "
            "would look for that run, and not create one. Put a word before the id, as in 'run-...'"
        )
    if "/" in run_id or "\0" in run_id:
        raise ConfigError(
            f"{argument}={run_id!r} must not contain / or a null character: it is the name of a directory"
        )


def _is_made_by_server(run_id: str) -> bool:
    """Whether pluto.init takes it for an id that the server made, and so does not create the run."""
    word, dash, number = run_id.rpartition("-")
    is_key = len(word) <= 4 and word.isascii() and word.isalnum() and word == word.upper()
    return number.isdecimal() and (not dash or is_key)


def _with_usable_id(request: RunRequest) -> RunRequest:
    """Return the request with an id that Pluto takes. A launcher's id may be a number, for example.

    Raises:
        ConfigError: The user has chosen an id by a variable, and Pluto does not take it.
    """
    from flyteplugins_tracking.trackers.client import new_id

    run_id = request.plan.run_id or new_id()
    if request.config.id is None and (request.plan.primary or request.info is not None):
        variable = next((name for name in PlutoTracker.run_id_variables if os.environ.get(name)), None)
        if variable is not None:
            _check_id(os.environ[variable], variable)
    usable = f"run-{run_id}" if _is_made_by_server(run_id) else run_id
    return replace(request, plan=replace(request.plan, run_id=usable))


TRACKER = PlutoTracker()
