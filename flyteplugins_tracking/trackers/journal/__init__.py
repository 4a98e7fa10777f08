"""Journals: what a writer has logged and its service may not have received, on the local disk.

In the room: the journal itself (`files`), runs that are logged to files while their service cannot be used (`local`),
what earlier attempts have left (`earlier`), logging lines anew (`relog`), and sending what a directory has (`replay`).
A journal has one contract: its writer adds each record once the vendor's client has it, and acknowledges what the
service has. Who reads it later gets the pending records: the next attempt of the job, or
`flyteplugins-tracking send`.
It may import `base`, `client` and `registry` of `trackers`. A tracker's own way to send is in the tracker's folder.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flyteplugins_tracking._util.text import without_credentials
from flyteplugins_tracking.errors import TrackerUnavailableError

# The arguments that are addresses of servers, and Pluto's settings that are.
_ADDRESSES = (
    *("host", "tracking_uri", "registry_uri", "server_url", "base_url"),
    *("url_app", "url_api", "url_ingest", "url_py"),
)


# The rest of a run's arguments is for the process that has written the file: settings may name a proxy for the key,
# or files to upload.
_OF_ITS_PROCESS = ("settings", "webhook_url")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
# A server's address, without a user and without what clients read in several ways, such as a backslash.
_ADDRESS = re.compile(
    r"([a-z][a-z0-9+.-]*)://([\w.-]+|\[[0-9a-f:.]+\])(?::(\d+))?(?:/[^\\\s]*)?", re.IGNORECASE | re.ASCII
)


def how_to_send(directories: str | Sequence[str], arguments: Mapping[str, Any] | None = None) -> str:
    """Return the command, for a shell, that sends what a directory has and its service has not.

    Args:
        directories: The directory, or several.
        arguments: The run's arguments, if they may name servers: the command says that these may get a key.
    """
    servers = "".join(f"--server {shlex.quote(without_credentials(one))} " for one in addresses_in(arguments or {}))
    paths = [directories] if isinstance(directories, str) else directories
    return f"flyteplugins-tracking send {servers}{' '.join(map(shlex.quote, paths))}"


def what_is_kept(count: int, lost: int) -> str:
    """Return the sentence on records that a service has not taken: how many of them the files have.

    Args:
        count: How many records the service has not taken.
        lost: How many of them are in no file.
    """
    if not lost:
        return "They are kept in files."
    return f"{count - lost} of them are kept in files, and {lost} are lost: the files could not be written."


def addresses_in(arguments: Mapping[str, Any]) -> list[str]:
    """Return the servers that a run's arguments name."""
    named = [arguments[name] for name in _ADDRESSES if "://" in str(arguments.get(name))]
    return [*map(str, named), *_addresses_in_settings(arguments).values()]


def arguments_to_send(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a run's file that the process takes which sends it: they say which run that is."""
    kept = {name: value for name, value in arguments.items() if name not in _OF_ITS_PROCESS}
    addresses = _addresses_in_settings(arguments)
    return {**kept, "settings": addresses} if addresses else kept


def _addresses_in_settings(arguments: Mapping[str, Any]) -> dict[str, str]:
    settings = arguments.get("settings")
    if not isinstance(settings, Mapping):
        return {}
    return {name: settings[name] for name in _ADDRESSES if isinstance(settings.get(name), str)}


def require_server(directory: Path, address: str, allowed: Iterable[str]) -> None:
    """Refuse to send the key of this process to an address that only the data names.

    Args:
        directory: The directory with the data.
        address: The server that it names.
        allowed: The servers that this process is set up for, or was told.

    Raises:
        TrackerUnavailableError: The address is none of them.
    """
    if _origin(address) not in (_origin(without_credentials(one)) for one in allowed):
        shown = without_credentials(address)
        raise TrackerUnavailableError(
            f"{directory} is of the server {shown}, for which this process is not set up: it gets no key of this "
            f"process. If the server is right: {how_to_send(str(directory), {'settings': {'host': shown}})}"
        )


def _origin(address: str) -> str | tuple[str, str, str | None]:
    """Return what two addresses of one server have in common; the address itself if it is not a server's."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return address.rstrip("/")
    scheme, host, port = match[1].lower(), match[2].lower(), match[3]
    return scheme, host, port or _DEFAULT_PORTS.get(scheme)
