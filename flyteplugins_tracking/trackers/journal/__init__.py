"""Journals: what a writer has logged and its service may not have received, on the local disk.

In the room: the journal itself (`files`), runs that are logged to files while their service cannot be used (`local`),
what earlier attempts have left (`earlier`), logging lines anew (`relog`), and sending what a directory has (`replay`).
A journal has one contract: its writer adds each record once the vendor's client has it, and acknowledges what the
service has. Who reads it later gets the pending records: the next attempt of the job, or
`python -m flyteplugins_tracking send`.
It may import `base`, `client` and `registry` of `trackers`. A tracker's own way to send is in the tracker's folder.
"""


def how_to_send(directory: str) -> str:
    """Return the command that sends what a directory has and its service has not."""
    return f"python -m flyteplugins_tracking send {directory}"
