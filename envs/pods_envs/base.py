"""What every reasoning environment shares: Problem, Verdict, the text space and ReasoningEnv itself."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import gymnasium
import numpy as np
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    Attributes:
        question: The problem text, without instructions on how to answer.
        answer: The reference (gold) answer, as the verifier of the environment expects it.
        info: Anything else the source knows: subject, level, the worked solution, ... What JSON can hold, for
            a trainer's data files.
    """

    question: str
    answer: str
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def info_json(self) -> str:
        """`info` as JSON, in which it travels to a trainer's reward function.

        Raises:
            TypeError: A value that JSON cannot hold.
        """
        for key, value in self.info.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"info[{key!r}] of the problem {self.question[:40]!r} is a {type(value).__name__} that JSON "
                    f"cannot hold ({error}); keep to strings, numbers, lists and dicts in Problem.info"
                ) from error
        return json.dumps(dict(self.info))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verifier found out about one response.

    Attributes:
        reward: What a trainer gets. A verifier gives 1.0 for a correct answer, 0.0 for a wrong one, or partial
            credit; the environment makes `(1 - format_weight) * reward + format_weight * format_ok` of it.
        correct: Whether the answer equals the reference.
        extracted: The answer found in the response; None if there is none.
        method: How it was decided: `exact`, `numeric`, `symbolic`, `no_answer`, `unparsable`, `timeout`, `memory`, ...
            (docs/verification.md lists them all).
        seconds: Wall-clock time of the decision. Not part of equality: two verdicts that say the same are
            equal.
        format_ok: Whether the answer stood where the answer format wants it.
    """

    reward: float
    correct: bool
    extracted: str | None
    method: str
    seconds: float = dataclasses.field(default=0.0, compare=False)
    format_ok: bool = False

    def weighted(self, format_weight: float) -> Verdict:
        """The same verdict with a share in [0, 1] of the reward given for the format."""
        reward = (1.0 - format_weight) * self.reward + format_weight * self.format_ok
        return dataclasses.replace(self, reward=float(reward))


class Verifier(Protocol):
    """Judges a response to a problem; never raises, never hangs: what it cannot judge is not correct."""

    def __call__(self, response: str, problem: Problem) -> Verdict:
        """The verdict on `response`."""


class AnyText(gymnasium.Space[str]):
    """Every Python string: any unicode, lone surrogates included, and the empty string.

    `gymnasium.spaces.Text` defaults to alphanumeric characters and at least one of them, which no prompt
    satisfies.

    Args:
        max_bytes: Room for one text (UTF-8) in the shared memory of an `AsyncVectorEnv`. Not a limit on
            membership.
        seed: Seed of `sample`.
    """

    def __init__(self, max_bytes: int = 1 << 16, seed: int | np.random.Generator | None = None):
        self.max_bytes = max_bytes
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """No: texts have no fixed length."""
        return False

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string."""
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random string of 0 to 32 characters from all of unicode, half of them ASCII."""
        length = int(self.np_random.integers(0, 33))
        limits = np.where(self.np_random.random(length) < 0.5, 0x80, 0x110000)
        return "".join(chr(code) for code in self.np_random.integers(0, limits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and self.max_bytes == other.max_bytes

    def __repr__(self) -> str:
        return "AnyText()"


# gymnasium.make_vec(..., vectorization_mode="async") passes observations through shared memory by default. A
# slot is four bytes of length and then the text. AsyncVectorEnv reads once, keeps the result and deep-copies
# it for the user at each step, so the result is a live view whose deep copy is the tuple of texts.
class _SharedTexts(Sequence[str]):
    def __init__(self, memory: Any, n: int, max_bytes: int):
        self._memory, self._n, self._max_bytes = memory, n, max_bytes

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._n)))
        start = range(self._n)[index] * (4 + self._max_bytes)
        slots = memoryview(self._memory.get_obj()).cast("B")
        length = int.from_bytes(slots[start : start + 4], "little")
        return bytes(slots[start + 4 : start + 4 + length]).decode("utf-8", "surrogatepass")

    def __deepcopy__(self, memo: Any) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(AnyText)
def _create(space: AnyText, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array("B", n * (4 + space.max_bytes))


@read_from_shared_memory.register(AnyText)
def _read(space: AnyText, shared_memory: Any, n: int = 1) -> Sequence[str]:
    return _SharedTexts(shared_memory, n, space.max_bytes)


@write_to_shared_memory.register(AnyText)
def _write(space: AnyText, index: int, value: str, shared_memory: Any) -> None:
    data = value.encode("utf-8", "surrogatepass")
    if len(data) > space.max_bytes:
        raise ValueError(
            f"an observation of {len(data)} bytes does not fit into the {space.max_bytes} bytes of shared "
            "memory for it; pass vector_kwargs={'shared_memory': False} to gymnasium.make_vec"
        )
    start = index * (4 + space.max_bytes)
    slots = memoryview(shared_memory.get_obj()).cast("B")
    slots[start : start + 4 + len(data)] = len(data).to_bytes(4, "little") + data


class ReasoningEnv(gymnasium.Env[str, str]):
    """A problem is asked, a response verified; with `max_turns` > 1 a wrong one gets feedback and a next try.

    One instance serves gymnasium by hand (`reset`, `step`), a trainer's data (`problems`, `messages`) and its
    reward function (`verify`). The reward of an episode is that of its last response; earlier, wrong ones
    give 0.

    Args:
        problems: The problems, in the order of their index.
        verifier: Judges a response to one of them.
        prompt_template: The user message; `{question}` stands for the question. Other braces are left as they
            are.
        system_prompt: The system message; None for none.
        format_weight: Share in [0, 1] of the reward given for a well-formed answer, right or wrong.
        max_turns: Responses allowed in one episode.
        feedback: What a wrong response is answered with while turns are left; `{turns_left}` is filled in.
        render_mode: None or `ansi` (`render` returns the conversation so far).
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (declared like this by gymnasium)
    splits: ClassVar[tuple[str, ...]] = ("train", "test")  # the values of `split=` that have problems

    def __init__(
        self,
        problems: Sequence[Problem],
        verifier: Verifier,
        *,
        prompt_template: str = "{question}",
        system_prompt: str | None = None,
        format_weight: float = 0.0,
        max_turns: int = 1,
        feedback: str = "That is not correct. Try again.",
        render_mode: str | None = None,
    ):
        if len(problems) == 0:
            raise ValueError("problems is empty: an environment needs at least one problem")
        if "{question}" not in prompt_template:
            raise ValueError(f"prompt_template={prompt_template!r} lacks the placeholder {{question}}")
        if not 0.0 <= format_weight <= 1.0:
            raise ValueError(f"format_weight={format_weight!r} is not in [0, 1]")
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns!r} is below 1; 1 means a single response")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(
                f"render_mode={render_mode!r} is not one of {[None, *self.metadata['render_modes']]}"
            )
        self.problems = problems
        self.verifier = verifier
        self.prompt_template = prompt_template
        self.system_prompt = system_prompt
        self.format_weight = format_weight
        self.max_turns = max_turns
        self.feedback = feedback
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._problem: Problem | None = None  # None: reset is due
        self._conversation: list[Message] = []
        self._turns = 0

    @classmethod
    def for_verification(cls, **kwargs: Any) -> ReasoningEnv:
        """An instance of which only `verify` will be used, as reward functions make it: problems need not be loaded.

        An environment whose problems are slow to load overrides this.
        """
        return cls(**kwargs)

    def messages(self, problem: Problem) -> list[Message]:
        """The chat messages that ask `problem`: the system prompt, if there is one, and the user message."""
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        content = self.prompt_template.replace("{question}", problem.question)
        return [*system, {"role": "user", "content": content}]

    def verify(self, response: str, problem: Problem) -> Verdict:
        """The verdict on `response` as an answer to `problem`, its reward weighted by `format_weight`."""
        return self.verifier(response, problem).weighted(self.format_weight)

    async def verify_async(self, response: str, problem: Problem) -> Verdict:
        """`verify` for an event loop; here in a thread."""
        import asyncio  # a fifth of the time that importing this package takes

        return await asyncio.to_thread(self.verify, response, problem)

    def verify_many(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """`verify` for each pair, in order."""
        return [self.verify(*pair) for pair in zip(responses, problems, strict=True)]

    def reference_response(self, problem: Problem) -> str:
        """A response that gives the reference answer in the format asked for."""
        return problem.answer

    def validate(self) -> list[tuple[int, Verdict]]:
        """Scores every reference answer against itself.

        Returns:
            (index, verdict) of the problems whose own reference response is not judged correct; empty if all
            is well.
        """
        responses = [self.reference_response(problem) for problem in self.problems]
        verdicts = self.verify_many(responses, self.problems)
        return [
            (index, verdict)
            for index, verdict in enumerate(verdicts)
            if not (verdict.correct and verdict.format_ok)
        ]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Asks a problem: number `options["index"]`, or a random one (reproducible by `seed`).

        Returns:
            The user message and `{"index": ..., "messages": [...]}`, the latter with the system prompt.
        """
        super().reset(seed=seed)
        index = (options or {}).get("index")
        if index is None:
            index = int(self.np_random.integers(len(self.problems)))
        elif not 0 <= index < len(self.problems):
            raise IndexError(f"index {index} is not in 0..{len(self.problems) - 1}")
        self._problem = self.problems[index]
        self._conversation = self.messages(self._problem)
        self._turns = 0
        info = {"index": index, "messages": [dict(message) for message in self._conversation]}
        return self._conversation[-1]["content"], info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judges a response.

        Returns:
            The feedback (empty at the end of the episode), the reward, terminated, truncated (always False)
            and `{"correct", "extracted", "reference", "format_ok", "verdict"}`.
        """
        if self._problem is None:
            raise gymnasium.error.ResetNeeded("step() needs a problem: call reset() first")
        problem = self._problem
        verdict = self.verify(action, problem)
        self._turns += 1
        terminated = verdict.correct or self._turns >= self.max_turns
        turns_left = self.max_turns - self._turns
        observation = "" if terminated else self.feedback.replace("{turns_left}", str(turns_left))
        self._conversation.append({"role": "assistant", "content": action})
        if terminated:
            self._problem = None
        else:
            self._conversation.append({"role": "user", "content": observation})
        info = {
            "correct": verdict.correct,
            "extracted": verdict.extracted,
            "reference": problem.answer,
            "format_ok": verdict.format_ok,
            "verdict": verdict,
        }
        return observation, verdict.reward if terminated else 0.0, terminated, False, info

    def render(self) -> str | None:  # type: ignore[override]
        """The conversation as text in render mode `ansi`."""
        if self.render_mode is None:
            return None
        return "\n".join(f"{message['role']}: {message['content']}" for message in self._conversation)
