"""Run a Python command line in a forked process as if it had been executed."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import ctypes
import fcntl
import gc
import itertools
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from support.warm.imports import HiddenModules

_HERE = __file__
# Options that the server has too: output is not buffered; what they say of bytecode makes no difference to a job.
_INHERITED_FLAGS = ("-u", "-B")
_MAIN_PROCESS = multiprocessing.process.current_process()


@dataclass(frozen=True)
class Program:
    """What an interpreter was told to run.

    Attributes:
        kind: "script", "module" (`-m`) or "code" (`-c`).
        target: The script's path, the module's name, or the code.
        argv: `sys.argv`.
        command_line: What `/proc` shows.
    """

    kind: str
    target: str
    argv: list[str]
    command_line: list[str]

    @classmethod
    def of(cls, command: Sequence[Any]) -> Program | None:
        """The program of a command line; None if it is not this interpreter's, or has options that need a new one."""
        words = [os.fsdecode(word) for word in command]
        if len(words) > 0 and _is_console_script(words[0]):
            return cls("script", words[0], words, [sys.executable, *words])
        if len(words) < 2 or words[0] != sys.executable:
            return None
        rest = list(itertools.dropwhile(lambda word: word in _INHERITED_FLAGS, words[1:]))
        if not rest:
            return None
        if rest[0] in ("-m", "-c") and len(rest) > 1:
            return cls({"-m": "module", "-c": "code"}[rest[0]], rest[1], [rest[0], *rest[2:]], words)
        return None if rest[0].startswith("-") else cls("script", rest[0], rest, words)


def _is_console_script(path: str) -> bool:
    """Whether it is a script that pip has installed for this interpreter, which has several names in its directory."""
    bin_directory = Path(sys.executable).parent
    if Path(path).parent != bin_directory:
        return False
    try:
        with open(path, "rb") as file:
            first = file.readline().decode(errors="replace").strip()
    except OSError:
        return False
    return first.startswith("#!") and Path(first[2:]).parent == bin_directory


class Forker:
    """Forks programs, from the server and from the jobs that it has forked.

    Attributes:
        hidden: The modules that programs find imported.
    """

    def __init__(self, hidden: HiddenModules) -> None:
        self.hidden = hidden
        self._path = [entry for entry in sys.path if entry not in _python_path(os.environ)]
        self._is_job = False
        # Those that modules have made when they were imported, as wandb does: each process has its own.
        self._directories = [one for one in gc.get_objects() if isinstance(one, tempfile.TemporaryDirectory)]

    def fork(
        self,
        program: Program,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        cwd: str | None = None,
        new_session: bool = False,
        kept_fds: Sequence[int] = (),
    ) -> int:
        """Start `program`, and return its process id.

        Args:
            program: What to run.
            env: Its environment.
            fds: Open files of this process, by the number that they have in the new one.
            cwd: Its working directory; None for this process's.
            new_session: Whether it leads a session of its own.
            kept_fds: Open files that it keeps, beside the first three.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            if new_session:
                os.setsid()
            self._become_new(program, env, fds, cwd, kept_fds)
            _run(program)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(70)  # `_run` does not return

    def _become_new(
        self, program: Program, env: Mapping[str, str], fds: Mapping[int, int], cwd: str | None, kept: Sequence[int]
    ) -> None:
        gc.freeze()  # what the parent has is never collected: its destructors are not this process's
        _reset_signals()
        _set_fds(fds, kept)
        if cwd is not None:
            os.chdir(cwd)
        _reset_multiprocessing()
        _set_environment(env)
        _show_in_proc(program.command_line, env)
        self.hidden.hide(forget_stateful=self._is_job)
        _reset_exit_functions(forget=self._is_job)
        self._is_job = True
        tempfile.tempdir = None  # TMPDIR may be another
        for directory in self._directories:
            directory.__init__(suffix=Path(directory.name).name)  # type: ignore[misc]
        sys.argv[:] = program.argv
        sys.orig_argv[:] = program.command_line
        first = str(Path(program.target).resolve().parent) if program.kind == "script" else ""
        sys.path[:] = [first, *_python_path(env), *self._path]
        sys.path_importer_cache.clear()

    def patch(self) -> None:
        """Have Python processes that this one starts forked, by `subprocess` and by `multiprocessing`'s spawn."""
        execute, spawn = subprocess.Popen._execute_child, multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

        def execute_child(popen: Any, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
            words = [args] if isinstance(args, (str, bytes)) else list(args)
            (_, pass_fds, cwd, env, _, _, shell, *handles) = rest[:13]
            *_, new_session, _ = rest
            program = None if shell or preexec_fn is not None or executable is not None else Program.of(words)
            if program is None:
                execute(popen, args, executable, preexec_fn, *rest)
                return
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = handles
            fds = {0: p2cread, 1: c2pwrite, 2: errwrite}
            environment = {**os.environ} if env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()}
            popen.pid = self.fork(
                program,
                environment,
                {number: fd for number, fd in fds.items() if fd != -1},
                None if cwd is None else os.fspath(cwd),
                new_session,
                pass_fds,
            )
            popen._child_created = True
            popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

        def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
            program = Program.of(args)
            if program is None:
                pid: int = spawn(path, args, passfds)
                return pid
            return self.fork(program, dict(os.environ), {}, kept_fds=[int(fd) for fd in passfds])

        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
        multiprocessing.util.spawnv_passfds = spawnv_passfds


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_fds(fds: Mapping[int, int], kept: Sequence[int]) -> None:
    """Put the given files where they belong, and close all others, as executing a program does.

    Objects of the parent may still own the numbers, and would close what gets them next: they own the null device then.
    """
    high = {number: os.dup(fd) for number, fd in fds.items()}
    for number, fd in high.items():
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (null, *kept):
            with suppress(OSError):  # the directory's own
                fcntl.fcntl(fd, fcntl.F_GETFD)
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _reset_multiprocessing() -> None:
    """What the standard library knows of the parent's children, and of where it was started."""
    process: Any = multiprocessing.process
    process.ORIGINAL_DIR = str(Path.cwd())
    process._children.clear()
    process._current_process, process._parent_process = _MAIN_PROCESS, None
    process._process_counter = itertools.count(1)
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _reset_exit_functions(forget: bool) -> None:
    """Keep what modules have registered when they were imported; `forget` what the parent has registered since."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    if forget:
        atexit._clear()
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    pools: Any = concurrent.futures.thread
    pools._threads_queues.clear()  # the threads of the parent's pools are not this process's to wait for
    pools._shutdown = False


def _set_environment(env: Mapping[str, str]) -> None:
    ctypes.CDLL(None).clearenv()
    os.environ._data.clear()  # type: ignore[attr-defined]
    os.environ.update(env)
    time.tzset()


def _show_in_proc(command_line: Sequence[str], env: Mapping[str, str]) -> None:
    """Write command line and environment where the kernel reads them: into the room that the server was given."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])  # 48 to 51 of proc(5)'s stat
    _write(arguments, arguments_end, "\0".join(command_line))
    _write(variables, variables_end, "\0".join(f"{name}={value}" for name, value in env.items()))


def _write(start: int, end: int, text: str) -> None:
    data = text.encode(errors="surrogateescape")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))


def _run(program: Program) -> None:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __file__=program.target if program.kind == "script" else None)
    if program.kind != "script":
        del main.__dict__["__file__"]
    sys.modules["__main__"] = main
    code = 0
    try:
        if program.kind == "module":
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]
        else:
            name = program.target if program.kind == "script" else "<string>"
            source = Path(program.target).read_bytes() if program.kind == "script" else program.target
            exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as error:
        code = _status(error)
    except BaseException as error:
        code = _uncaught(error)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                code = code or 120
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _status(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _uncaught(error: BaseException) -> int:
    error.__traceback__ = _without_ours(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _without_ours(raised_at: TracebackType | None) -> TracebackType | None:
    while raised_at is not None and raised_at.tb_frame.f_code.co_filename == _HERE:
        raised_at = raised_at.tb_next
    return raised_at
