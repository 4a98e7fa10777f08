"""The roll-call of a job that makes no progress: each rank writes its stacks, and the primary says who is where.

The watch looks at the job's board a few times within `hang_timeout_s`. A rank with a run that has not
logged and not called `heartbeat` for that time calls the roll: it starts an episode there, once. Every rank then writes
its stacks by `faulthandler`, and the primary groups them.

The thread cannot run on a rank that holds the GIL. There `faulthandler`'s own C thread writes the stacks, since the
thread has not put its deadline off; and the primary of the same machine reads them from the file.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import stat
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.board import Board, from_text, to_text
from flyteplugins_tracking._job.watch import Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util import proc
from flyteplugins_tracking._util.modules import is_own
from flyteplugins_tracking._util.text import in_words, printable

# How often the thread looks, within `hang_timeout_s`.
_LOOKS = 5
# The primary waits for the other ranks' stacks as long as `hang_timeout_s`, and at most this long.
_LONGEST_ANSWER_S = 10.0
# The most bytes of all stacks of a process.
_LONGEST_DUMP = 1 << 20
_POLL_S = 0.1
# faulthandler's format: https://docs.python.org/3/library/faulthandler.html. The innermost frame comes first.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class RollCallDuty(Duty):
    """Watches the progress of this rank, and answers when a roll is called."""

    topic = "hang"

    def __init__(
        self, info: DistributedInfo, timeout_s: float, show: Callable[[str, str], object] | None, has_run: bool
    ) -> None:
        """Called in the thread that runs the decorated function.

        Args:
            info: This rank.
            timeout_s: `hang_timeout_s`.
            show: What the primary does with the answers: who is where, in one line, and a string with the stacks of
                all ranks. None on the other ranks.
            has_run: Whether this rank logs, and so calls the roll. The others only answer: nobody knows of their steps.
        """
        self._info = info
        self._timeout_s = timeout_s
        self._show = show
        self._has_run = has_run
        self._thread_id = threading.get_ident()  # the thread that runs the decorated function
        self._started_s = time.monotonic()
        # Without a name: it ends with this process, however that ends, and no forked child can remove it.
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._alarmed_at = -1.0  # the progress that was the last one when this rank has called the roll
        self._answered = 0
        self._answers: dict[int, _Answer] | None = None  # those of the episode that the primary waits for
        self._answers_until = 0.0

    def next_wait_s(self) -> float:
        return self._timeout_s / _LOOKS if self._answers is None else _POLL_S

    def begin(self, board: Board) -> None:
        """Say where the other ranks find this one. From here on a rank that takes the GIL is found too."""
        super().begin(board)
        self._put_off()
        # Not by the attempt: torchelastic's agents count restarts each for itself. The numbers of episodes continue.
        place = _Place(socket.gethostname(), os.getpid(), self._thread_id, self._file.fileno())
        self.board.put(f"place/{self._info.rank}", to_text(place))
        self._answered = self.board.count("episodes")

    def look(self) -> None:
        """Call the roll, or answer it, if it is time."""
        was_blocked = self._put_off()
        if self._answers is not None:
            self._collect(self._answers)
            return
        episode = self.board.count("episodes")
        # While this rank was blocked, others may have called the roll: then it only answers.
        if episode == self._answered and self._is_silent() and self.board.count(f"claims/{episode}", 1) == 1:
            episode = self.board.count("episodes", 1)
        if episode > self._answered:
            self._answered = episode
            self._alarmed_at = self._last_progress()  # the roll is called once for all ranks that hang
            self._answer(episode, was_blocked)
        elif was_blocked:
            self._empty_file()  # nobody has asked

    def end(self, has_failed: bool) -> None:  # noqa: ARG002 nobody is told
        """Take the deadline back, and show the answers that have come."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._answers is not None:
            self._show_answers(self._answers)

    def _put_off(self) -> bool:
        """Put off `faulthandler`'s deadline. Returns whether it has passed: somebody has held the GIL."""
        was_blocked = os.fstat(self._file.fileno()).st_size > 0
        faulthandler.cancel_dump_traceback_later()
        if not was_blocked:
            faulthandler.dump_traceback_later(self._timeout_s, file=self._file, exit=False)
        return was_blocked

    def _is_silent(self) -> bool:
        """Whether this rank calls the roll: once, until it has made progress again."""
        last_s = self._last_progress()
        return self._has_run and time.monotonic() - last_s > self._timeout_s and last_s != self._alarmed_at

    def _last_progress(self) -> float:
        return max(progress.last_progress(), self._started_s)

    def _answer(self, episode: int, was_blocked: bool) -> None:
        if not was_blocked:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback(file=self._file, all_threads=True)
        self._file.seek(0)
        dump = self._file.read().decode(errors="replace")
        self._empty_file()
        where = place_of(frames_of(dump, self._thread_id))
        self.board.put(f"stacks/{episode}/{self._info.rank}", to_text(_Answer(f"at {where}", dump)))
        if self._show is not None:
            self._answers = {}
            self._answers_until = time.monotonic() + min(self._timeout_s, _LONGEST_ANSWER_S)

    def _empty_file(self) -> None:
        self._file.seek(0)
        self._file.truncate()

    def _collect(self, answers: dict[int, _Answer]) -> None:
        """Read the answers that have come since the last look, and show all if it is time."""
        missing = [rank for rank in range(self._info.world_size) if rank not in answers]
        texts = self.board.get_all(f"stacks/{self._answered}/{rank}" for rank in missing)
        for rank, text in zip(missing, texts, strict=True):
            if text is not None:
                answers[rank] = from_text(_Answer, text) or _Answer("has given an answer that cannot be read")
        if len(answers) == self._info.world_size or time.monotonic() > self._answers_until:
            self._show_answers(answers)

    def _show_answers(self, answers: dict[int, _Answer]) -> None:
        self._answers = None
        for rank in range(self._info.world_size):
            if rank not in answers:
                answers[rank] = _silent_rank(self.board, rank)
        line = f"no progress for {self._timeout_s:g} s: "
        line += verdict_of({rank: answer.place for rank, answer in answers.items()})
        dumps = [f"rank {rank}\n{answers[rank].dump}" for rank in sorted(answers) if answers[rank].dump]
        if self._show is not None:
            self._show(line, "\n\n".join([line, *dumps]))


@dataclass(frozen=True)
class _Place:
    """Where other processes of the machine find a rank's stacks: a file without a name, which its process has open."""

    host: str
    pid: int
    thread_id: int
    descriptor: int


@dataclass(frozen=True)
class _Answer:
    """Where a rank is, in words, and its stacks."""

    place: str
    dump: str = ""


def _silent_rank(board: Board, rank: int) -> _Answer:
    """Return all that is known of a rank that does not answer: from this machine, if it is here."""
    text = board.get(f"place/{rank}")
    if text is None:
        return _Answer("has not entered the function")
    place = from_text(_Place, text)
    if place is None or place.host != socket.gethostname():
        return _Answer("does not answer")
    state = proc.state(place.pid)
    if state in ("", "Z"):
        return _Answer("has ended")
    if state in ("T", "t"):
        return _Answer("is stopped by a signal")
    with suppress(OSError):
        dump = _dump_of(place)
        frames = frames_of(dump, place.thread_id)
        if frames:
            return _Answer(f"holds the GIL at {place_of(frames)}", dump)
    return _Answer("does not answer")


def _dump_of(place: _Place) -> str:
    """Return the contents of a file without a name: the board must not make us read any other file.

    Raises:
        OSError: It is another kind of file, or cannot be read.
    """
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != os.geteuid():
            raise PermissionError(path)
        return printable(file.read(_LONGEST_DUMP).decode(errors="replace"))


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither the standard library's nor a package's."""
        return not self.file.startswith((*_LIBRARIES, "<")) and not is_own(self.file)


def frames_of(dump: str, thread_id: int) -> list[Frame]:
    """Return the frames of a thread in a dump of all threads, the innermost first; none if it is not there."""
    parts = _THREAD.split(dump)[1:]
    stacks = dict(zip(parts[::2], parts[1::2], strict=True))
    stack = next((text for ident, text in stacks.items() if int(ident, 16) == thread_id), "")
    return [Frame(file, int(line), function) for file, line, function in _FRAME.findall(stack)]


def place_of(frames: Sequence[Frame]) -> str:
    """Return where a thread is, as in "train.py:88 all_reduce": the user's line, and the innermost function."""
    if not frames:
        return "an unknown place"
    users = next((frame for frame in frames if frame.is_users), frames[0])
    return f"{Path(users.file).name}:{users.line} {frames[0].function}"


def verdict_of(places: Mapping[int, str]) -> str:
    """Return the places of all ranks in one line, the ranks of equal places together.

    Args:
        places: Where each rank is, in words: "at train.py:88 all_reduce", "does not answer".
    """
    ranks_by_place: dict[str, list[int]] = {}
    for rank, words in sorted(places.items()):
        ranks_by_place.setdefault(words, []).append(rank)
    by_size = sorted(ranks_by_place.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{in_words('rank', ranks)} {words}" for words, ranks in by_size)
