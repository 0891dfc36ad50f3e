"""Children of tests are forked from a process that has torch imported, where they would import it for seconds.

A process that asks for `python -m` one of MODULES by `subprocess.Popen` gets a fork of its own template: a process that
has imported what they import, and started nothing. The fork becomes what would have been started: a child of who
asked, which can wait for it; with the same arguments and environment (also as the system shows them), folder, files,
session, limits and processors. One that starts children itself leaves a template for these at its birth. Templates
are not shown among a process's children. Whatever is asked in another way, with another Python or in an environment in
which torch would be imported otherwise, is started plainly; so is all in `plainly()`, and what starts from there.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

PARENTS = {
    "engine.loop.process": (),
    "engine": ("serve", "run-batch", "join"),
    "faulty_server": ("serve",),
    "tests.script": (),
    "tests.benchmarks.instant_server": (),
}
"""Modules that may be forked, with the first arguments with which they may, or () for any; these start children."""
LEAVES = {
    "engine_kit.compiling.child": (),
    "engine_reference.executor_process.rank": (),
    "engine_sdk.conformance.communicator.ranks": (),
    "engine_server.processes.child": (),
    "played_child": (),
}
"""And these start none."""
IMPORTED = (
    "torch",
    "engine.cli.main",
    "engine.loop.assemble",
    "engine.runner.assemble",
    "engine.runner.worker",
    "engine.process.run",
    "engine_kit.async_llm",
    "engine_server.run",
    "engine_server.processes.parent",
    "fastapi",
    "uvicorn",
    "safetensors.torch",
    "tokenizers",
    "psutil",
    # What servers and cores import as they start: half of the time that they take for it.
    "encodings.idna",
    "httptools",
    "jinja2.ext",
    "jinja2.sandbox",
    "pydantic.v1",
    "starlette.middleware.cors",
    "stevedore.driver",
    "stevedore.named",
    "tomllib",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "engine_kit.flags",
    "engine_kit.vllm_flags",
    "engine_reference.attention_torch.attention",
    "engine_reference.models.llama",
    "engine_reference.ops_torch.ops",
    "engine_reference.tokenizer_hf.template",
    "engine_reference.tokenizer_hf.tokenizer",
    "engine_server.anthropic.routes",
    "engine_server.app",
    "engine_server.openai.chat",
    "engine_server.openai.completions",
    "engine_server.openai.models",
    "engine_server.operations",
    "engine_server.pooling.routes",
    "engine_server.responses.routes",
)
READ_AT_IMPORT = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "TORCH",
    "ATEN_",
    "ONEDNN_",
    "TRITON_",
    "LD_",
    "MALLOC_",
)
"""Beginnings of variables by which a process that has imported torch differs from one that has not."""
READ_LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
"""But not these: `_become` does what the first says, and torch sets the second itself in whoever makes a model of
transformers', for when it compiles. What is started after that would be started plainly."""
ROOM = {"arguments": 1 << 12, "environment": 1 << 15}
"""Bytes for what the system shows of a fork."""
NAME = b"test-template"
LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
ANSWER_SECONDS = 120.0
"""How long a template may take to import all, and to answer."""
HIGH = 700
"""Descriptors of ours begin here."""

_PR_SET_NAME, _PR_SET_MM, _PR_SET_CHILD_SUBREAPER = 15, 35, 36
_PR_ARGUMENTS_END = 9
_libc = ctypes.CDLL(None, use_errno=True)
_plain_popen = subprocess.Popen


class Template:
    """Who asks a template for forks. Thread-safe.

    Args:
        end: of the socket whose other end is the template's; None: it is started when it is needed first.
    """

    def __init__(self, end: socket.socket | None = None) -> None:
        self._end = end
        self._owner = os.getpid()
        self._asking = threading.Lock()
        self.plainly = 0

    def fork(self, command: list[str], options: Mapping[str, Any], files: dict[int, int]) -> int | None:
        """Have a process forked that runs `python -m COMMAND`. Returns its id; None where it must be started plainly.

        Args:
            options: see `_become`.
            files: by descriptor that it shall have, which of ours that is.
        """
        if self.plainly or os.getpid() != self._owner:
            return None
        asked = {
            **options,
            "command": command,
            "files": list(files),
            "ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
            "processors": sorted(os.sched_getaffinity(0)),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }
        with self._asking:
            if self._end is None:
                self._end = _started()
            # What is forked by a process that then ends becomes a child of its next ancestor that takes orphans.
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                data = array.array("i", files.values())
                self._end.settimeout(ANSWER_SECONDS)
                self._end.sendmsg([json.dumps(asked).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)])
                return int(self._end.recv(32)) or None
            except TimeoutError:
                self._end.close()
                raise AssertionError(f"the template has not answered for {ANSWER_SECONDS:g} s: {command}") from None
            except (OSError, ValueError):  # it has gone
                self.plainly += 1
                return None
            finally:
                _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        """End the template."""
        if self._end is not None:
            self._end.close()


def install(template: Template) -> None:
    """Have this process's children forked, and hide their templates."""

    class Popen(_plain_popen):  # type: ignore[type-arg, misc]
        """As its parent, but for commands that the template can serve."""

        def _execute_child(self, *args: Any) -> None:
            bound = _signature.bind(self, *args).arguments
            pid = None
            if (command := _command(bound)) is not None:
                given = {0: bound["p2cread"], 1: bound["c2pwrite"], 2: bound["errwrite"]}
                files = {own: own if given == -1 else given for own, given in given.items()}
                files |= {passed: passed for passed in bound["pass_fds"]}
                options = {
                    "environment": dict(os.environ if bound["env"] is None else bound["env"]),
                    "folder": os.fspath(bound["cwd"] or os.getcwd()),
                    "session": bool(bound["start_new_session"]),
                    "group": bound["process_group"],
                }
                with contextlib.suppress(TypeError):  # an environment of bytes
                    pid = template.fork(command, options, files)
            if pid is None:
                return super()._execute_child(*args)
            self.pid = pid
            self._child_created = True
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(bound[name] for name in pipes))

    subprocess.Popen = Popen  # type: ignore[misc]
    import psutil

    plain_children = psutil.Process.children

    def children(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        return [child for child in plain_children(self, recursive) if not _is_template(child)]

    psutil.Process.children = children  # type: ignore[method-assign]


_signature = inspect.signature(_plain_popen._execute_child)


def _command(bound: Mapping[str, Any]) -> list[str] | None:
    """What follows `python -m` where that can be forked."""
    args = bound["args"]
    if bound["executable"] or bound["preexec_fn"] or bound["shell"] or isinstance(args, (str, bytes)):
        return None
    args = [os.fspath(part) for part in args]
    if args[:2] != [sys.executable, "-m"] or bound["process_group"] not in (-1, 0) or bound.get("umask", -1) != -1:
        return None
    first = {**PARENTS, **LEAVES}.get(args[2] if len(args) > 2 else "")
    return args[2:] if first is not None and (not first or (args[3:4] and args[3] in first)) else None


def _is_template(process: Any) -> bool:
    try:
        with open(f"/proc/{process.pid}/comm", "rb") as comm:
            return comm.read().strip() == NAME
    except OSError:
        return False


def _started() -> socket.socket:
    """Start this process's template: a new process, which imports what its forks need."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "TEMPLATE_ROOM": "x" * ROOM["environment"]}
    command = [sys.executable, __file__, str(its.fileno()), "x" * ROOM["arguments"]]
    with its:
        _plain_popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    return ours


# -- the template ------------------------------------------------------------------------------------------------------
def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that torch and Python read once; READ_LATER aside."""
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k not in READ_LATER}


def serve(end: socket.socket) -> NoReturn:
    """Fork for whoever asks, until he has gone."""
    _libc.prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = read_at_import(os.environ)
    while True:
        message, rights, _, _ = end.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 64))
        if not message:
            os._exit(0)
        files = array.array("i")
        for _, _, data in rights:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
        asked = json.loads(message)
        pid = 0
        if read_at_import(asked["environment"]) == own and not _customised(asked["environment"]):
            reader, writer = os.pipe()
            middle = os.fork()
            if middle == 0:
                if os.fork() == 0:
                    _become(asked, list(files), end, writer)
                os._exit(0)
            os.close(writer)
            os.waitpid(middle, 0)
            pid = int(os.read(reader, 32) or b"0")
            os.close(reader)
        for file in files:
            os.close(file)
        end.send(b"%d" % pid)


def _customised(environment: Mapping[str, str]) -> bool:
    """Whether Python would run a file of the user's when it starts."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return any(os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in folders if folder)


def _become(asked: dict[str, Any], files: list[int], end: socket.socket, born: int) -> NoReturn:
    """In the fork: be `python -m COMMAND`, and end.

    Args:
        asked: "command"; "environment"; "folder"; "session", whether in one of its own; "group", 0: in a process group
            of its own; "files", the descriptors that it shall have; "ignored", whether SIGINT is; "limits";
            "processors"; "niceness".
        files: those of ours that these are.
        end: the template's socket.
        born: a pipe, to write its id to when it looks as it should.
    """
    import atexit
    import gc
    import importlib
    import random
    import runpy
    import traceback

    code: Any = 1
    command, environment = asked["command"], asked["environment"]
    try:
        if asked["session"]:
            os.setsid()
        elif asked["group"] == 0:
            os.setpgid(0, 0)
        end.close()
        born, *high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in (born, *files)]
        os.closerange(3, HIGH)
        for target, file in zip(asked["files"], high, strict=True):
            os.dup2(file, target, inheritable=True)
            os.close(file)
        for name in list(os.environ):
            del os.environ[name]
        _show(command, environment)
        os.write(born, b"%d" % os.getpid())
        os.close(born)
        os.environ.update(environment)
        os.chdir(asked["folder"])
        for name, limits in asked["limits"].items():
            resource.setrlimit(getattr(resource, name), limits)
        os.sched_setaffinity(0, asked["processors"])
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), asked["niceness"]))
        signal.signal(signal.SIGINT, signal.SIG_IGN if asked["ignored"] else signal.default_int_handler)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        sys.__stdin__ = sys.stdin
        sys.__stdout__ = sys.stdout
        sys.__stderr__ = sys.stderr
        folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.path[:] = [asked["folder"], *folders, *_OWN_PATH]
        sys.argv = list(command)
        sys.orig_argv = [sys.executable, "-m", *command]
        random.seed()
        importlib.invalidate_caches()
        if command[0] in PARENTS:
            _leave_template(end)
        gc.enable()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


_OWN_PATH: list[str] = []


def _leave_template(end: socket.socket) -> None:
    """Before anything has begun: fork the template of this process's children."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):
            os.dup2(nothing, file)
        serve(its)
    its.close()
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    ours.close()
    install(Template(socket.socket(fileno=high)))


def _show(command: list[str], environment: Mapping[str, str]) -> None:
    """Write arguments and environment where the system looks for them."""
    with open("/proc/self/stat") as stat:
        places = [int(value) for value in stat.read().rpartition(")")[2].split()[45:49]]
    shown = [sys.executable, "-m", *command], [f"{name}={value}" for name, value in environment.items()]
    for start, end, texts, which in zip(places[::2], places[1::2], shown, (_PR_ARGUMENTS_END, 0), strict=True):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))
        if which:  # where it is allowed; else empty arguments follow
            _libc.prctl(_PR_SET_MM, which, ctypes.c_ulong(start + len(data)), 0, 0)
    _libc.prctl(_PR_SET_NAME, b"python", 0, 0, 0)


def main() -> None:
    import gc
    import importlib

    gc.disable()
    _OWN_PATH[:] = [
        folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ]
    del sys.path[0]
    _libc.prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in (*PARENTS, *LEAVES):
        if name != "engine":
            sys.modules.pop(name, None)
    sys.modules.pop("engine.__main__", None)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "what is forked must have one thread"
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
