"""Interpreters that have imported torch and bagua already, forked in milliseconds instead of started in seconds.

``subprocess.Popen([*interpreter(), "-c", script])`` is like ``[sys.executable, "-c", script]``: the script has its own
arguments, environment, folder and streams, it is ``__main__``, and it ends as an interpreter ends, with handlers at
exit, the teardown of modules, and C++'s last words. Only the imports were made before. Not for tests of imports, of
options of ``python``, or of variables that torch reads while it is imported.

Three processes take part. A *server*, one for each test session and choice of modules, imports and forks. A *script* is
its grandchild. The *process that the test has started* hands its streams to the server, and ends as the script ends;
when it is killed, the script is killed.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import sys

_LENGTH = struct.Struct("!i")
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def interpreter(*modules: str) -> list[str]:
    """The command that stands for ``sys.executable``: ``-c text``, ``-m module`` or a file follows, and arguments.

    Args:
        modules: more modules that were imported before. Each choice has a server of its own.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), _server_address(modules)]


def _server_address(modules: tuple[str, ...]) -> str:
    """Where that server of this session listens; it is started the first time, and ends with this process."""
    import subprocess  # Not at the top: the process that only hands its streams over must start fast.

    found: dict[tuple[str, ...], str] = vars(_server_address).setdefault("found", {})
    if modules not in found:
        ready, told = os.pipe()
        lifeline, held = os.pipe()  # Whose end that is held here closes with this process, whatever ends it.
        os.set_inheritable(held, False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _FOLDER}
        command = [sys.executable, "-m", "tests.interpreters", "serve", str(told), *modules]
        server = subprocess.Popen(command, stdin=lifeline, pass_fds=[told], env=environment, cwd=_FOLDER)
        server.returncode = 0  # Nobody waits for it.
        os.close(lifeline)
        os.close(told)
        with os.fdopen(ready) as answer:
            found[modules] = answer.read()
    return found[modules]


def spare_the_collector() -> None:
    """Spare the garbage collector the walk through all that exists now, until this process ends."""
    gc.freeze()
    if "triton" in sys.modules:  # CUDA builds of torch bring it, and it prints what is left when a process has ended.
        atexit.register(gc.unfreeze)


def _follow(address: str, arguments: list[str]) -> None:
    """In the process that the test has started: have a script run, and end as it ends."""
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        socket.send_fds(connection, [_LENGTH.pack(len(request))], [0, 1, 2])
        connection.sendall(request)
        status = _LENGTH.unpack(_receive(connection, _LENGTH.size))[0]
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError("the other process has ended")
        data += piece
    return data


def _serve(told: int) -> list[str]:
    """Fork a process for each request, until nobody can ask any more. Returns, in each script, its arguments."""
    listener = socket.socket(socket.AF_UNIX)
    address = f"bagua-tests-{os.getpid()}-{os.urandom(8).hex()}"
    listener.bind(f"\0{address}")
    listener.listen(64)
    os.write(told, address.encode())
    os.close(told)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes that wait for scripts.
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _begin_script(connection)
        connection.close()


def _begin_script(connection: socket.socket) -> list[str]:
    """Fork the script, and wait for its end in the process that is here. Returns in the script only."""
    length, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
    arguments, environment, folder = json.loads(_receive(connection, _LENGTH.unpack(length)[0]))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    script = os.fork()
    if script:
        _wait_for(script, connection, streams)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return arguments


def _wait_for(script: int, connection: socket.socket, streams: list[int]) -> None:
    """Tell how the script ends; kill it when there is nobody to be told."""
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = os.pidfd_open(script)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(script, signal.SIGKILL)
    _, status = os.waitpid(script, 0)
    with contextlib.suppress(OSError):
        connection.sendall(_LENGTH.pack(status))
    os._exit(0)


def _prepare(arguments: list[str]) -> object:
    """Make ``__main__`` and ``sys.argv`` for what ``python *arguments`` would run, and return its code."""
    import importlib.util
    import types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        return compile(arguments[1], "<string>", "exec")
    if arguments[0] == "-m":
        spec = main.__spec__ = importlib.util.find_spec(arguments[1])
        sys.argv = [spec.origin, *arguments[2:]]
        return spec.loader.get_code(arguments[1])
    sys.argv, main.__file__ = arguments, arguments[0]
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    with open(arguments[0], encoding="utf-8") as text:
        return compile(text.read(), arguments[0], "exec")


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        _follow(sys.argv[1], sys.argv[2:])
    import importlib

    import torch._dynamo  # noqa: F401 - every optimizer imports it at its first step, for two seconds

    import bagua.torch_api  # noqa: F401 - for the scripts

    for module in sys.argv[3:]:
        importlib.import_module(module)
    spare_the_collector()  # Collecting garbage would write to all memory that scripts share with the server.
    code = _prepare(_serve(int(sys.argv[2])))
    # At the top of the program, so that an error leaves it as that of any script does.
    exec(code, vars(sys.modules["__main__"]))
