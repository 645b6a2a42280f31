"""Episodes of a gymnasium text environment, played from an event loop. What verl does with them: agent_loop.py.

Nothing here needs verl: the settings, the reading of a row of `pods data`, and the thread an environment lives on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import math
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pods_envs

LOOP_NAME = "pods_env"
SETTINGS_KEY = f"actor_rollout_ref.rollout.custom.{LOOP_NAME}"
ROWS = ("episode", "turn")
_MAKING = 10  # times as long as a step may take: an environment's constructor may load its problems


class EpisodeError(Exception):
    """An environment failed, or is used wrongly; one line. It costs its session, not the rest of the group."""


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """The mapping `actor_rollout_ref.rollout.custom.pods_env` of verl's config.

    Attributes:
        step_timeout_s: Seconds that one `reset`, `step` or `close` of an environment may take; its making ten times
            as long.
        rows: `episode`: the whole conversation is one row to train on. `turn`: each response is a row of its own,
            asked with the conversation as the chat template renders it then, which may drop earlier reasoning.
    """

    step_timeout_s: float = 60.0
    rows: str = "episode"

    @classmethod
    def of(cls, custom: Mapping[str, Any] | None) -> EpisodeSettings:
        """Reads the settings out of `rollout.custom`.

        Raises:
            ValueError: An unknown key or a value that cannot be used.
        """
        given = dict((custom or {}).get(LOOP_NAME) or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(
                    f"{SETTINGS_KEY}.{key} is no setting of the loop; write one of {', '.join(known)}"
                )
        settings = cls(**given)
        limit = settings.step_timeout_s
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < math.inf:
            raise ValueError(
                f"{SETTINGS_KEY}.step_timeout_s={limit!r} is no positive number of seconds; write 60"
            )
        if settings.rows not in ROWS:
            raise ValueError(f"{SETTINGS_KEY}.rows={settings.rows!r} is not one of {', '.join(ROWS)}")
        return settings


@dataclasses.dataclass(frozen=True)
class Task:
    """What a row of the data says about its episode.

    Attributes:
        env_id: A gymnasium id, the row's `data_source`.
        env_kwargs: Passed to `gymnasium.make`: `extra_info.env_kwargs` (JSON) and, where there is one,
            `extra_info.split`.
        index: `extra_info.index`: the seed and the option `index` of `reset`.
    """

    env_id: str
    env_kwargs: dict[str, Any]
    index: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Task:
        """Reads a row.

        Raises:
            EpisodeError: It was not written by `pods data`.
        """
        try:
            extra = row["extra_info"]
            env_kwargs = json.loads(extra["env_kwargs"])
            if extra.get("split") is not None:
                env_kwargs["split"] = extra["split"]
            return cls(str(row["data_source"]), env_kwargs, int(extra["index"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EpisodeError(
                f"a row lacks data_source, extra_info.env_kwargs or extra_info.index ({error!r}); "
                "write the data with: pods data ENV_ID --out DIR"
            ) from None


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an environment answered to one response."""

    observation: str
    reward: float
    ended: bool
    info: Mapping[str, Any]


class Episode:
    """An environment and the thread it lives on, from its making to its closing.

    A thread of its own: one that hangs would keep a thread of the event loop's pool for ever, and some environments
    may only be used from the thread that made them. It is a daemon, so that it does not keep the process from ending.
    """

    def __init__(self, task: Task, timeout_s: float):
        self._task = task
        self._timeout_s = timeout_s
        self._env: gymnasium.Env[Any, Any] | None = None
        self._stuck = False
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name=f"episode of {task.env_id}", daemon=True).start()

    async def reset(self) -> tuple[str, Mapping[str, Any]]:
        """Makes the environment and starts the episode.

        Returns:
            The first observation, and its info.

        Raises:
            EpisodeError: It raised, took too long, or its observation is no text.
        """
        await self._call("make", self._make, self._timeout_s * _MAKING)
        index = self._task.index
        result = await self._call(
            "reset", lambda: self._made().reset(seed=index, options={"index": index}), self._timeout_s
        )
        observation, info = self._unpacked(result, "reset", 2)
        self._check_text(observation, "reset")
        return observation, info

    async def step(self, response: str) -> Turn:
        """Gives the environment a response.

        Raises:
            EpisodeError: It raised, took too long, or returned something else than text and a finite reward.
        """
        result = await self._call("step", lambda: self._made().step(response), self._timeout_s)
        observation, reward, terminated, truncated, info = self._unpacked(result, "step", 5)
        self._check_text(observation, "step")
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise EpisodeError(
                f"step of {self._task.env_id} gave the reward {reward!r}, expected a finite number"
            )
        return Turn(observation, value, bool(terminated or truncated), info)

    async def close(self) -> None:
        """Closes the environment and ends the thread; to be called once, whatever happened before.

        After a call that took too long the environment is closed as soon as that call returns: to close it under a
        running step, from another thread, is nothing gymnasium allows.

        Raises:
            EpisodeError: `close` raised or took too long.
        """
        try:
            if self._stuck:
                self._calls.put((concurrent.futures.Future(), self._close))
            else:
                await self._call("close", self._close, self._timeout_s)
        finally:
            self._calls.put(None)

    # Called on the episode's thread:

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # a SystemExit of an environment must not end the thread either
                future.set_exception(error)

    def _make(self) -> None:
        # The checker of gymnasium belongs to `pods check-env`; here it would print a warning for each session.
        self._env = gymnasium.make(self._task.env_id, disable_env_checker=True, **self._task.env_kwargs)

    def _made(self) -> gymnasium.Env[Any, Any]:
        assert self._env is not None
        return self._env

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    # Called in the event loop:

    async def _call(self, name: str, function: Callable[[], Any], limit_s: float) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((future, function))
        waiter = asyncio.wrap_future(future)
        waiter.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # seen, by whoever reads it below
        try:
            await asyncio.wait({waiter}, timeout=limit_s)
        except asyncio.CancelledError:
            self._stuck = not future.cancel()
            raise
        if (
            not future.done()
        ):  # not the waiter: on a starved machine the event loop hears of it after the limit
            self._stuck = True
            raise EpisodeError(
                f"{name} of {self._task.env_id} took more than {limit_s:g} s ({SETTINGS_KEY}.step_timeout_s)"
            )
        try:
            return future.result()
        except BaseException as error:
            text = " ".join(str(error).split())[:300]
            raise EpisodeError(
                f"{name} of {self._task.env_id} raised {type(error).__name__}: {text}"
            ) from error

    def _unpacked(self, result: Any, name: str, length: int) -> Sequence[Any]:
        if not (isinstance(result, tuple) and len(result) == length and isinstance(result[-1], Mapping)):
            raise EpisodeError(
                f"{name} of {self._task.env_id} returned {str(result)[:80]!r}, expected a tuple of {length} that ends "
                "with a dict"
            )
        return result

    def _check_text(self, observation: Any, name: str) -> None:
        if not isinstance(observation, str):
            raise EpisodeError(
                f"{name} of {self._task.env_id} gave an observation of type {type(observation).__name__}, expected a "
                "str: only text environments can be played by a language model"
            )


def first_messages(
    observation: str, info: Mapping[str, Any], prompt: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The chat messages an episode starts with.

    Those of `info["messages"]`, as pods_envs.ReasoningEnv gives them; else the system messages of the row's prompt, if
    any, and the observation as user message.
    """
    if info.get("messages"):
        return [dict(message) for message in info["messages"]]
    system = [dict(message) for message in prompt if message.get("role") == "system"]
    return [*system, {"role": "user", "content": observation}]


def outcome(turns: Sequence[Turn]) -> tuple[float, dict[str, Any]]:
    """The reward of an episode, which is the sum of its turns' rewards, and verl's reward_extra_info.

    The latter holds `num_turns` (responses) and, as far as the info of the last step has them, `acc`, `format_ok`,
    `extracted` and `method`, as the reward function of single-turn runs names them.
    """
    info = turns[-1].info
    extra: dict[str, Any] = {"num_turns": len(turns)}
    for name, key in (("acc", "correct"), ("format_ok", "format_ok")):
        if key in info:
            extra[name] = float(info[key])
    verdict = info.get("verdict")
    if isinstance(verdict, pods_envs.Verdict):
        extra.update({"extracted": verdict.extracted or "", "method": verdict.method})
    return math.fsum(turn.reward for turn in turns), extra


def check_files(paths: Iterable[str]) -> None:
    """Looks into data files for environments that no worker would find; files that are not here are left out.

    Raises:
        ValueError: A `data_source` is no registered environment.
    """
    from pyarrow import parquet  # type: ignore[import-untyped]

    for path in paths:
        file = Path(path).expanduser()
        if (
            file.suffix != ".parquet"
            or not file.is_file()
            or "data_source" not in parquet.read_schema(file).names
        ):
            continue
        for env_id in parquet.read_table(file, columns=["data_source"])["data_source"].unique().to_pylist():
            try:
                pods_envs.env_spec(env_id)
            except (gymnasium.error.Error, ImportError) as error:
                raise ValueError(
                    f"{path}: data_source {env_id!r} is no registered environment ({' '.join(str(error).split())}); "
                    f"the agent loop {LOOP_NAME} needs data written with: pods data ENV_ID --out DIR"
                ) from None
