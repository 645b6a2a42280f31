"""A worker process: pool.py starts it as a script, so it imports nothing of ours.

A supervisor loads a module of work once (`warm()` and `answer(request)`, such as symbolic_worker.py) and forks
a child that answers requests, one JSON line each, on the inherited pipes. The kernel kills the child when its
timer fires or its memory is used up, whatever C code it is in; the supervisor says why and forks the next
one, which takes milliseconds.
"""

import importlib.util
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any, BinaryIO

OUT_OF_MEMORY, RENEW = 3, 4  # exit codes of the child; 0: the requests have ended
REQUESTS_PER_CHILD = 1000  # sympy's caches grow


def serve(work: ModuleType, requests: BinaryIO, replies: int) -> None:
    """Answers requests until they end; runs in the child."""
    for _ in range(REQUESTS_PER_CHILD):
        line = requests.readline()
        if not line:
            os._exit(0)
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # SIGALRM is not caught: it kills
        try:
            reply = work.answer(request)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, {"id": request["id"], **reply})
    os._exit(RENEW)


def send(replies: int, message: dict[str, Any]) -> None:
    """Writes one line to the descriptor `replies`."""
    os.write(replies, json.dumps(message).encode() + b"\n")


def load(path: str) -> ModuleType:
    """The module in the file `path`."""
    spec = importlib.util.spec_from_file_location("work", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """The supervisor. Arguments: megabytes, sys.path as JSON, the file of the work."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like a reply
    megabytes = int(sys.argv[1])
    sys.path[:] = json.loads(sys.argv[2])  # as in the process that started us
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work = load(sys.argv[3])
    work.warm()
    send(replies, {"method": "ready"})
    while True:
        child = os.fork()
        if child == 0:
            try:
                serve(work, os.fdopen(os.dup(0), "rb", buffering=0), replies)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code != RENEW:
            methods = {-signal.SIGALRM: "timeout", OUT_OF_MEMORY: "memory", -signal.SIGKILL: "memory"}
            send(replies, {"method": methods.get(code, "error")})


if __name__ == "__main__":
    main()
