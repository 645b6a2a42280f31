"""Embedded trainers: a mixin over each of verl's V1 trainers that polls fast and never hangs.

verl's trainer waits for its workers without a time-out: one that dies at the wrong moment leaves the run
standing for ever. The mixin starts a thread that watches every actor of the run, and the run's progress, and
ends the process with one line when there is nothing left to wait for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.rollout.llm_server import LLMServerManager

from pods_plugin.cpu.settings import timeout_s

EXIT_CODE = 13
# verl asks TransferQueue for news every 2 s, hard-coded: most of the time of a small step.
POLL_INTERVAL_S = 0.05


class EmbeddedTrainerMixin:
    """Fast polling, samples in the log and a watchdog for an embedded run."""

    config: Any
    global_steps: int
    _watchdog: Watchdog | None = None

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        # Set on the instance that verl built, whichever class it is of: its other settings stay
        # (filter_groups).
        buffer.poll_interval = POLL_INTERVAL_S
        return buffer

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Sequence[Any],
        scores: Sequence[float],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write them as verl does (trainer.rollout_data_dir), and show the best and the worst in the log."""
        order = sorted(range(len(scores)), key=lambda i: scores[i])
        for name, i in (("best", order[-1]), ("worst", order[0])) if order else ():
            print(
                f"step {self.global_steps}, {name} of {len(scores)}: reward {scores[i]:.2f}, "
                f"reference {gts[i]!r}\n  prompt:   {inputs[i]!r}\n  response: {outputs[i]!r}",
                flush=True,
            )
        super()._dump_generations(inputs, outputs, gts, scores, *args, **kwargs)  # type: ignore[misc]

    def init(self) -> None:
        """Start the watchdog, then set up as verl does."""
        self._watchdog = Watchdog(
            actors=lambda: actors_of(self),
            progress=lambda: progress_of(self),
            checkpoint=lambda: last_checkpoint(self.config.trainer.default_local_dir),
        )
        self._watchdog.start()
        try:
            super().init()  # type: ignore[misc]
        except BaseException:
            self._watchdog.stop(failed=True)
            raise

    def fit(self, agent_loop_manager: Any) -> None:
        """Train as verl does, and stop the watchdog."""
        assert self._watchdog is not None, "init() comes before fit()"
        failed = True
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
            failed = False
        finally:
            self._watchdog.stop(failed=failed)


class Watchdog(threading.Thread):
    """Ends this process when an actor of the run has died, or when nothing has moved for too long.

    Args:
        actors: Gives the actors to watch by name; asked again at every look, since they come one by one.
        progress: Gives anything that compares unequal once the run has moved.
        checkpoint: Gives the folder of the last checkpoint, or None.
        stall_s: How long nothing may move; default 1.5 x PODS_CPU_TIMEOUT_S, so that the waits which know
            better what they wait for speak first.
        grace_s: How long the trainer may take to fail by itself after a death, before it is ended.
        interval_s: Time between looks.
        leave: Ends the process; os._exit, because the main thread sits in a wait that no exception reaches.
    """

    def __init__(
        self,
        *,
        actors: Callable[[], dict[str, Any]],
        progress: Callable[[], object],
        checkpoint: Callable[[], str | None],
        stall_s: float | None = None,
        grace_s: float = 10.0,
        interval_s: float = 1.0,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        super().__init__(name="pods-watchdog", daemon=True)
        self._actors = actors
        self._progress = progress
        self._checkpoint = checkpoint
        self._stall_s = 1.5 * timeout_s() if stall_s is None else stall_s
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._leave = leave
        self._stopped = threading.Event()
        self._looking = threading.Lock()
        self._failed = False
        self._said = False
        self._pending: dict[str, Any] = {}  # actor -> its unanswered call
        self._since: dict[str, float] = {}  # actor -> when that call was made
        self._answers: dict[str, object] = {}

    def stop(self, *, failed: bool = False) -> None:
        """The run has ended; if it failed, say whether an actor died."""
        self._failed = failed
        self._stopped.set()
        if failed:
            died = self._look(wait_s=3.0)  # Ray takes a moment to know, on a busy machine longer
            if died is not None:
                self._say(f"{died[0]} died: {died[1]}")

    def run(self) -> None:
        """Look, until stopped."""
        state: object = None
        moved = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            died = self._look()
            if self._stopped.is_set():
                if died is not None and self._failed:
                    self._say(f"{died[0]} died: {died[1]}")
                return
            if died is not None:
                self._end(f"{died[0]} died: {died[1]}", self._grace_s)
                return
            now = (self._progress(), dict(self._answers))
            if now != state:
                state, moved = now, time.monotonic()
            elif time.monotonic() - moved > self._stall_s:
                self._end(f"nothing has moved for {self._stall_s:g} s{self._busy()}", 0.0)
                return

    def _look(self, wait_s: float = 0.1) -> tuple[str, str] | None:
        """Call every actor that has answered its last call. Returns name and cause of one that died."""
        with self._looking:
            return self._call_all(wait_s)

    def _call_all(self, wait_s: float) -> tuple[str, str] | None:
        for name, handle in self._actors().items():
            if name not in self._pending:
                self._pending[name] = _sign_of_life(handle)
                self._since[name] = time.monotonic()
        names = {call: name for name, call in self._pending.items()}
        if not names:
            return None
        done, _ = ray.wait(list(names), num_returns=len(names), timeout=wait_s)
        for call in done:
            name = names[call]
            del self._pending[name]
            try:
                self._answers[name] = ray.get(call)
            except ray.exceptions.RayActorError as error:
                return name, _cause(error)
            except ray.exceptions.RayError as error:
                self._answers[name] = type(error).__name__  # alive, in its way
        return None

    def _busy(self) -> str:
        """Who has not answered since it was last asked, longest first."""
        waits = {name: time.monotonic() - self._since[name] for name in self._pending}
        stuck = [
            name for name in sorted(waits, key=lambda name: -waits[name]) if waits[name] > self._stall_s / 2
        ]
        return f"; still busy: {', '.join(stuck)}" if stuck else ""

    def _say(self, why: str) -> None:
        if self._said:
            return
        self._said = True
        folder = self._checkpoint()
        then = (
            f"resume from {folder} with trainer.resume_mode=auto" if folder else "there is no checkpoint yet"
        )
        print(f"verl-pods: the run ends, {why}; {then}.", file=sys.stderr, flush=True)

    def _end(self, why: str, grace_s: float) -> None:
        self._say(why)
        if self._stopped.wait(grace_s):
            return
        self._stopped.wait(1.0)  # until Ray has carried the line to the driver
        self._leave(EXIT_CODE)


def actors_of(trainer: Any) -> dict[str, Any]:
    """The Ray actors that a trainer depends on, by a name for people; those that exist so far."""
    actors: dict[str, Any] = {}
    for attribute, value in list(vars(trainer).items()):
        if isinstance(value, RayWorkerGroup):
            for rank, worker in enumerate(value.workers):
                # Actor and reference policy share their workers: one name each.
                if not any(worker == other for other in actors.values()):
                    actors[f"training worker {rank} ({attribute.removesuffix('_wg')})"] = worker
        elif isinstance(value, LLMServerManager):
            for replica in getattr(value, "rollout_replicas", None) or []:
                for server in replica.servers:
                    actors[f"rollout server {replica.server_address}"] = server
            balancer = getattr(value, "global_load_balancer", None)
            if balancer is not None:
                actors[f"load balancer ({attribute})"] = balancer
        elif isinstance(value, AgentLoopManager):
            for index, worker in enumerate(value.agent_loop_workers):
                actors[f"agent loop worker {index}"] = worker
        elif isinstance(value, RewardLoopManager):
            for index, worker in enumerate(value.reward_loop_workers):
                actors[f"reward worker {index}"] = worker
    return actors


def progress_of(trainer: Any) -> tuple[object, ...]:
    """What changes while a run moves: its step, the phases done, the queue as the trainer last saw it."""
    buffer = trainer.replay_buffer
    # The main thread fills these while they are read: a count may be off for a moment, which does no harm.
    queue = tuple(
        sum(len(keys) for keys in list(part.values()))
        for part in (buffer.partitions, buffer.pending_keys, buffer.running_keys, buffer.finished_keys)
    )
    return getattr(trainer, "global_steps", None), tuple(getattr(trainer, "timing_raw", ())), queue


def last_checkpoint(folder: str) -> str | None:
    """The last complete checkpoint under `trainer.default_local_dir`, from verl's tracker file."""
    folder = os.path.abspath(folder)
    try:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as tracker:
            step = int(tracker.read())
    except (OSError, ValueError):
        return None
    return os.path.join(folder, f"global_step_{step}")


def install_trainers() -> None:
    """Put the mixin over whatever is registered under each trainer's name, other mixins included."""
    from verl.trainer.ppo.v1 import trainer_base  # here: its import is what calls this function

    for name, cls in list(trainer_base.TRAINER_REGISTRY.items()):
        if not issubclass(cls, EmbeddedTrainerMixin):
            # register_trainer refuses a second class under a name, so the entry is replaced.
            trainer_base.TRAINER_REGISTRY[name] = type(
                f"Embedded{cls.__name__}", (EmbeddedTrainerMixin, cls), {"__module__": __name__}
            )


def _sign_of_life(handle: Any) -> Any:
    """A call that any living actor answers, when it gets to it; ours with how far it is, for a long batch."""
    call = getattr(handle, "heartbeat", None)
    return (call or handle.__ray_ready__).remote()


def _cause(error: BaseException) -> str:
    """The telling part of Ray's many lines."""
    text = " ".join(str(error).split())
    for mark in ("The actor is dead because", "The actor died because"):
        if mark in text:
            text = text[text.index(mark) + len(mark) :].strip()
            break
    return text.split(" Some common causes")[0][:200].rstrip(". ")  # then comes a list of guesses
