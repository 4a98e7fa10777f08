"""The board of a job: where its ranks leave short strings for each other. No rank waits for another there.

It is in the job's store if the job has one, so that ranks of all nodes read it. Else it is a directory of this machine.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flyteplugins_tracking._job.store import SHORT_TIMEOUT, connected_store
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._rank.launchers import rank_variable
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.files import private_directory, read_own, replace_whole
from flyteplugins_tracking._util.lock import locked
from flyteplugins_tracking._util.text import parse_json, printable
from flyteplugins_tracking._util.warn_once import WarnOnce

logger = logging.getLogger(__name__)
_warn_once = WarnOnce(logger)
T = TypeVar("T")
_NAMESPACE = "flyteplugins_tracking"
_POLL_S = 0.05
# The longest string in a directory: a failure has some kilobytes.
_LONGEST = 1 << 20
# The errors of a key without a string, and of one whose string is longer: no rank has stored that.
_NO_STRING = (errno.ENOENT, errno.EFBIG)
# How many strings may be counted and not there, in one reading: a rank counts its string before it stores it.
_MOST_MISSING = 100


class Board:
    """A part of a job's board. Threads may share it.

    Its methods raise a RuntimeError if the store has gone: with torch.distributed's own store, with rank 0.

    Attributes:
        store: What all ranks share.
    """

    def __init__(self, store: Any, topic: str) -> None:
        """Does nothing in the store yet.

        Args:
            store: What all ranks share: a `torch.distributed.Store`, or an object with its methods `add`, `set`, `get`,
                `check` and `compare_set`.
            topic: Separates what has nothing to do with each other.
        """
        self.store = store
        self._prefix = f"{_NAMESPACE}/{topic}"
        self._known: set[str] = set()  # names that have a string: none is ever taken away

    @property
    def is_of_machine(self) -> bool:
        """Whether only ranks of this machine read it."""
        return isinstance(self.store, DirectoryStore)

    def of_topic(self, topic: str) -> Board:
        """Return the board of another topic, over the same connection."""
        board = Board(self.store, topic)
        board._known = self._known
        return board

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter, and return its value. It is 0 at first; and, with one warning, if it is no number."""
        try:
            return int(self.store.add(f"{self._prefix}/{key}", amount))
        except (ValueError, IndexError):  # torch's stores raise both
            _warn_once("counter", "a counter on the job's board is left out, since it is no number: %s", key)
            return 0

    def put(self, key: str, text: str) -> None:
        """Store a string, in the place of an earlier one."""
        self.store.set(f"{self._prefix}/{key}", text)

    def put_first(self, key: str, text: str) -> str:
        """Store a string if there is none, and return the one that is stored: the same to all ranks."""
        return bytes(self.store.compare_set(f"{self._prefix}/{key}", "", text)).decode(errors="replace")

    def get(self, key: str) -> str | None:
        """Return the string of this key; None if there is none."""
        name = f"{self._prefix}/{key}"
        return bytes(self.store.get(name)).decode(errors="replace") if self.store.check([name]) else None

    def get_all(self, keys: Iterable[str]) -> list[str | None]:
        """Return the strings of these keys, None for each that has none: in one request, if all have had one before."""
        names = [f"{self._prefix}/{key}" for key in keys]
        self._learn([name for name in names if name not in self._known])
        stored = [name for name in names if name in self._known]
        read = getattr(self.store, "multi_get", lambda several: [self.store.get(name) for name in several])
        texts = dict(zip(stored, read(stored) if stored else (), strict=True))
        return [bytes(texts[name]).decode(errors="replace") if name in texts else None for name in names]

    def _learn(self, names: Sequence[str]) -> None:
        """Find out by halves which of these names have a string: a store waits for one that has none."""
        if names and self.store.check(list(names)):
            self._known.update(names)
        elif len(names) > 1:
            middle = len(names) // 2
            self._learn(names[:middle])
            self._learn(names[middle:])

    def append(self, text: str) -> None:
        """Append a string to those of all ranks."""
        self.put(f"text/{self.count('texts', 1)}", text)

    def texts(self) -> list[str]:
        """Return the strings that all ranks have appended, in their order."""
        return list(self.numbered_texts(0, ()).values())

    def numbered_texts(self, start: int, known: Container[int]) -> dict[int, str]:
        """Return the strings of all ranks by their numbers, from `start` on and without the `known`."""
        texts: dict[int, str] = {}
        missing = 0
        for number in range(start, self.count("texts")):
            text = None if number in known else self.get(f"text/{number + 1}")
            if text is not None:
                texts[number] = text
            elif number not in known:
                missing += 1
                if missing > _MOST_MISSING:  # somebody has raised the counter
                    break
        return texts

    def wait_for_texts(self, number: int, timeout_s: float) -> list[str]:
        """Wait until the ranks have appended `number` strings, or for `timeout_s`, and return the strings."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            # A rank counts its string before it stores it.
            if self.count("texts") >= number and len(texts := self.texts()) >= number:
                return texts
            time.sleep(_POLL_S)
        return self.texts()


def job_board(
    info: DistributedInfo, env: Mapping[str, str], topic: str, timeout: timedelta = SHORT_TIMEOUT
) -> Board | None:
    """Return the board in the job's store; None if the job has no store that is known.

    Raises:
        RuntimeError: The store has not answered within `timeout`.
    """
    store = connected_store(info, env, timeout)
    return None if store is None else Board(store, topic)


def nearest_board(
    info: DistributedInfo,
    env: Mapping[str, str],
    topic: str,
    directory: Path | None = None,
    timeout: timedelta = SHORT_TIMEOUT,
) -> Board:
    """Return the board in the job's store or, if the job has none, that of this machine's ranks. One rank has its own.

    Args:
        info: This rank.
        env: The launcher's variables.
        topic: Separates what has nothing to do with each other.
        directory: What `board_directory` returned earlier, for a process whose parent may have ended since.
        timeout: How long the store may take to answer.

    Raises:
        RuntimeError: It does not answer. This machine's board would not do: the other ranks may be on the store's.
    """
    if info.world_size == 1:
        return Board(OwnStore(), topic)
    try:
        board = job_board(info, env, topic, timeout)
    except ImportError:  # a job without torch, or with a broken one
        board = None
    return board or Board(DirectoryStore(directory or board_directory(info, env)), topic)


def from_text(kind: type[T], text: str) -> T | None:
    """Return the dataclass whose fields a string of the board has, as JSON.

    None, with one warning, if it is another program's string or a damaged one.
    """
    try:
        values = {
            name: printable(value) if isinstance(value, str) else value for name, value in parse_json(text).items()
        }
        hints = get_type_hints(kind)
        if all(_fits(value, hints[name]) for name, value in values.items()):
            return kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    text = text[:80]
    _warn_once(kind.__name__, "a string on the job's board is left out, since it is no %s: %r", kind.__name__, text)
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a field's type."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float)
    kind = get_origin(hint) or hint
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


class OwnStore(dict[str, bytes]):
    """A store for a process without other ranks, as far as that needs one."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return its value."""
        value = int(self.get(key, 0)) + amount
        self.set(key, str(value))
        return value

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self[key] = value.encode()

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys have been stored."""
        return all(key in self for key in keys)


class DirectoryStore:
    """A store for the processes of one machine: a file for each key."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made when something is stored."""
        self.directory = directory

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is 0 at first, and return its value."""
        with self._locked() if amount else nullcontext():
            value = int(self._read(key) or 0) + amount
            if amount:
                self._write(key, str(value))
            return value

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        with self._locked():
            self._write(key, value)

    def get(self, key: str) -> bytes:
        """Return a value that has been stored."""
        return self._read(key)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Store a value if the present one is `expected`, "" for none; return the one that is stored then."""
        with self._locked():
            if self._read(key) == expected.encode():
                self._write(key, value)
            return self._read(key)

    def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys have been stored."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self.directory / hashlib.sha256(key.encode()).hexdigest()[:32]

    def _read(self, key: str) -> bytes:
        try:
            return read_own(self._path(key), _LONGEST)
        except OSError as error:
            if error.errno not in _NO_STRING:
                raise
            return b""

    def _write(self, key: str, value: str) -> None:
        replace_whole(self._path(key), value)  # its readers take no lock

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.directory / "lock", SHORT_TIMEOUT.total_seconds()):
            yield


def board_directory(info: DistributedInfo, env: Mapping[str, str]) -> Path:
    """Return a directory for the ranks of this machine that one launcher process has started, for one attempt."""
    launcher = proc.nearest_without(rank_variable(info.launcher))
    step = env.get("SLURM_STEP_ID", "")
    names = (proc.machine(), launcher, proc.start_time(launcher), info.job_id, step, env.get("MASTER_PORT"))
    digest = hashlib.sha256("\0".join(map(str, names)).encode()).hexdigest()[:16]
    return private_directory("boards") / digest
