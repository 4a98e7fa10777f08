"""The roll-call of a job that makes no progress: each rank writes its stacks, and the primary says who is where.

The watch looks at the job's board a few times within `hang_timeout_s`. A rank with a run that has not logged and not
called `heartbeat` for that time calls the roll: it starts an episode there, once. Every rank then writes the stacks of
its threads to its stderr, and one line to the board: where the function is. The primary groups these lines.

The thread cannot run on a rank that holds the GIL. There `faulthandler`'s own C thread writes the stacks, since the
thread has not put its deadline off; and the primary says that the rank does not answer.
"""

from __future__ import annotations

import faulthandler
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from flyteplugins_tracking._job import progress
from flyteplugins_tracking._job.board import Board
from flyteplugins_tracking._job.watch import Duty
from flyteplugins_tracking._rank.info import DistributedInfo
from flyteplugins_tracking._util.modules import is_own
from flyteplugins_tracking._util.text import in_words, printable

# How often the thread looks, within `hang_timeout_s`.
_LOOKS = 5
# The primary waits for the other ranks' answers as long as `hang_timeout_s`, and at most this long.
_LONGEST_ANSWER_S = 10.0
# The longest answer of a rank that is shown, in characters.
_LONGEST_ANSWER = 300
_POLL_S = 0.1
# The descriptor: the object may be a notebook's, which has no file.
_STDERR = 2
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
            show: What the primary does with the answers: who is where, in one line, and a line for each rank. None on
                the other ranks.
            has_run: Whether this rank logs, and so calls the roll. The others only answer: nobody knows of their steps.
        """
        self._info = info
        self._timeout_s = timeout_s
        self._show = show
        self._has_run = has_run
        self._thread_id = threading.get_ident()  # the thread that runs the decorated function
        self._started_s = time.monotonic()
        self._alarmed_at = -1.0  # the progress that was the last one when this rank has called the roll
        self._answered = 0
        self._answers: dict[int, str] | None = None  # those of the episode that the primary waits for
        self._answers_until = 0.0

    def next_wait_s(self) -> float:
        return self._timeout_s / _LOOKS if self._answers is None else _POLL_S

    def begin(self, board: Board) -> None:
        """Begin to watch. From here on a rank that takes the GIL writes its stacks too."""
        super().begin(board)
        self._put_off()
        # Not by the attempt: torchelastic's agents count restarts each for itself. The numbers of episodes continue.
        self._answered = self.board.count("episodes")

    def look(self) -> None:
        """Call the roll, or answer it, if it is time."""
        self._put_off()
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
            self._answer(episode)

    def end(self, has_failed: bool) -> None:  # noqa: ARG002 nobody is told
        """Take the deadline back, and show the answers that have come."""
        faulthandler.cancel_dump_traceback_later()
        if self._answers is not None:
            self._show_answers(self._answers)

    def _put_off(self) -> None:
        """Put off `faulthandler`'s deadline, which passes if somebody holds the GIL."""
        faulthandler.dump_traceback_later(self._timeout_s, file=_STDERR, exit=False)

    def _is_silent(self) -> bool:
        """Whether this rank calls the roll: once, until it has made progress again."""
        last_s = self._last_progress()
        return self._has_run and time.monotonic() - last_s > self._timeout_s and last_s != self._alarmed_at

    def _last_progress(self) -> float:
        return max(progress.last_progress(), self._started_s)

    @property
    def _ranks(self) -> Sequence[int]:
        """The ranks that may answer: this one alone if the job has no store."""
        return [self._info.rank] if self.board.is_own else range(self._info.world_size)

    def _answer(self, episode: int) -> None:
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        where = f"at {place_of(frames_of(sys._current_frames().get(self._thread_id)))}"
        self.board.put(f"places/{episode}/{self._info.rank}", where)
        if self._show is not None:
            self._answers = {self._info.rank: where}
            self._answers_until = time.monotonic() + min(self._timeout_s, _LONGEST_ANSWER_S)

    def _collect(self, answers: dict[int, str]) -> None:
        """Read the answers that have come since the last look, and show all if it is time."""
        missing = [rank for rank in self._ranks if rank not in answers]
        texts = self.board.get_all(f"places/{self._answered}/{rank}" for rank in missing)
        found = zip(missing, texts, strict=True)
        answers.update({rank: printable(text[:_LONGEST_ANSWER]) for rank, text in found if text is not None})
        if len(answers) == len(self._ranks) or time.monotonic() > self._answers_until:
            self._show_answers(answers)

    def _show_answers(self, answers: Mapping[int, str]) -> None:
        self._answers = None
        places = {rank: answers.get(rank, "does not answer") for rank in self._ranks}
        line = f"no progress for {self._timeout_s:g} s: {verdict_of(places)}"
        if self._show is not None:
            self._show(line, "\n".join([line, *(f"rank {rank} {words}" for rank, words in places.items())]))


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


def frames_of(frame: FrameType | None) -> list[Frame]:
    """Return the frames of a stack, the innermost first: this one and those that have called it."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


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
