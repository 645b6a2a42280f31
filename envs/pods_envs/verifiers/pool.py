"""Pools of worker processes for what may hang, such as computer algebra; shared by the threads of a process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORKERS = max(1, min(4, os.cpu_count() or 1))
MEMORY_MB = 1024
_STARTUP_SECONDS = 120  # importing sympy on a busy machine
_GRACE_SECONDS = 0.5  # how much later than its own timer a worker is killed from here
_LEFT_BY_STARTUP = 0.5  # seconds that waiting for a new worker leaves a verification at least
_FOLDER = Path(__file__).parent


class WorkerError(Exception):
    """A worker gave no answer; `method` says why: timeout, memory, unparsable or error."""

    def __init__(self, method: str):
        super().__init__(method)
        self.method = method


class _Worker:
    """One supervisor process and its pipes (see worker.py)."""

    def __init__(self, work: str, memory_mb: int):
        # A plain child process rather than multiprocessing: daemonic processes (AsyncVectorEnv's) may not
        # start those, and a spawned one would import the user's main script.
        arguments = [str(memory_mb), json.dumps(sys.path), str(_FOLDER / work)]
        self.process = subprocess.Popen(
            [sys.executable, str(_FOLDER / "worker.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._ready = False
        self._requests = 0

    def wait_until_ready(self) -> None:
        """Returns when the imports are done.

        Raises:
            WorkerError: The worker did not start.
        """
        if not self._ready and self._reply(_STARTUP_SECONDS) != {"method": "ready"}:
            self.kill()
            raise WorkerError("error")
        self._ready = True

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The value that the worker replies to one request.

        Raises:
            WorkerError: No answer.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[
            0
        ]:  # the last words of a child that was killed idle
            if not self._reply(0):
                raise WorkerError("error")
        self._requests += 1
        line = json.dumps({**request, "id": self._requests, "seconds": seconds}).encode() + b"\n"
        try:
            self.process.stdin.write(line)
        except OSError as error:
            raise WorkerError("error") from error
        reply = self._reply(seconds + _GRACE_SECONDS)
        while reply.get("id", self._requests) != self._requests:  # of a request that was given up
            reply = self._reply(seconds + _GRACE_SECONDS)
        if "value" not in reply:
            raise WorkerError(str(reply.get("method", "error")))
        return reply["value"]

    def _reply(self, seconds: float) -> dict[str, object]:
        """The next line of the worker; kills it if none comes in time. Empty if it has ended."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.kill()
                return {"method": "timeout"}
            received = os.read(descriptor, 4096)
            if not received:
                return {}
            line += received
        reply: dict[str, object] = json.loads(line)
        return reply

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.drop()

    def drop(self) -> None:
        """Closes our ends of the pipes; without them the worker ends by itself."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Pool:
    """At most `workers` processes, started when they are needed and replaced when they have been killed.

    Args:
        work: The file beside this one that holds what they do.
        workers: How many there may be.
        memory_mb: Address space of each.
    """

    def __init__(self, work: str = "symbolic_worker.py", workers: int = WORKERS, memory_mb: int = MEMORY_MB):
        self.work = work
        self.memory_mb = memory_mb
        self.workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(workers)
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="pods-verify")
        # For work in this process that an event loop should not do: threads that compete for the GIL with it
        # would keep it waiting all the same.
        self.one_thread = ThreadPoolExecutor(1, thread_name_prefix="pods-verify-long")

    def warm(self) -> None:
        """Starts the first worker, if there is none, and does not wait for it: imports take it a second."""
        if self.workers:
            return
        with self._lock:
            if not self.workers:
                self._idle.append(self._start())

    def ask(self, request: dict[str, Any], budget: Budget) -> Any:
        """Asks a free worker, waiting for one if all are busy. That waiting does not count against the budget.

        Raises:
            WorkerError: No answer within the budget.
        """
        with self._free:
            worker = self._take()
            try:
                start = time.monotonic()
                worker.wait_until_ready()
                budget.spend_on_startup(time.monotonic() - start)
                with budget as seconds:
                    return worker.ask(request, seconds)
            except KeyboardInterrupt:
                worker.kill()  # its reply would be taken for the next one's
                raise
            finally:
                self._give_back(worker)

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                self._discard(worker)
            return self._start()

    def _start(self) -> _Worker:
        worker = _Worker(self.work, self.memory_mb)
        self.workers.append(worker)
        return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.alive:
                self._idle.append(worker)
            else:
                self._discard(worker)

    def _discard(self, worker: _Worker) -> None:
        worker.drop()
        if worker in self.workers:
            self.workers.remove(worker)

    def close(self) -> None:
        """Kills the workers."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.one_thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for worker in self.workers:
                worker.close()
            self.workers.clear()
            self._idle.clear()


class Budget:
    """Wall-clock time that one verification may spend in workers, over all its questions."""

    def __init__(self, seconds: float):
        self.left = seconds

    def spend_on_startup(self, seconds: float) -> None:
        """Waiting for a worker's imports counts, so that the verdict is not late, but it does not use up all."""
        self.left = min(self.left, max(self.left - seconds, _LEFT_BY_STARTUP))

    def __enter__(self) -> float:
        if self.left <= 0:
            raise WorkerError("timeout")
        self._start = time.monotonic()
        return self.left

    def __exit__(self, *_: object) -> None:
        self.left -= time.monotonic() - self._start


_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


def shared_pool(work: str = "symbolic_worker.py") -> Pool:
    """The pool of this process for `work`, made on first use and closed at exit."""
    pool = _pools.get(work)
    if pool is None:
        with _pools_lock:
            if work not in _pools:
                _pools[work] = Pool(work)
            pool = _pools[work]
    return pool


def close_pool() -> None:
    """Ends the workers of this process. The next verification that needs one starts new ones."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


def _after_fork_in_child() -> None:
    """A forked child must not talk through its parent's pipes, nor keep them open."""
    global _pools_lock
    _pools_lock = threading.Lock()
    for pool in _pools.values():
        for worker in pool.workers:
            worker.process.returncode = 0  # it is our parent's child: nothing to wait for
            worker.drop()
    _pools.clear()


atexit.register(close_pool)
os.register_at_fork(after_in_child=_after_fork_in_child)
