"""What GSM8K, MATH and MATH-500 share: problems from a source, and a final answer that is verified."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pods_envs.base import Problem, ReasoningEnv, Verdict
from pods_envs.sources import load_problems, once_per_process
from pods_envs.verifiers import verify, verify_async, verify_many

INSTRUCTIONS = {
    "boxed": "Reason step by step and put the final answer within \\boxed{}.",
    "hash": 'Reason step by step and end with a line that holds "#### " and the final answer.',
    "xml": "Reason step by step and put the final answer within <answer> and </answer>.",
}
_REFERENCE_RESPONSES = {"boxed": "\\boxed{%s}", "hash": "#### %s", "xml": "<answer>%s</answer>"}


@dataclasses.dataclass(frozen=True)
class AnswerVerifier:
    """`pods_envs.verify` as a Verifier."""

    dataset: str
    answer_format: str

    def __call__(self, response: str, problem: Problem) -> Verdict:
        """The verdict on `response`."""
        return verify(response, problem.answer, self.dataset, self.answer_format)


class AnswerEnv(ReasoningEnv):
    """Problems with one final answer.

    A subclass says where its problems come from and how they are written.

    Args:
        source: `hub` for the original data set (through the package `datasets`), `procedural` for problems
            made on the spot, or anything that sources.load_problems takes: a `.jsonl` or `.parquet` file in
            the original schema, the name of another data set of the hub, an iterable of rows or Problems. In
            the name of a file, `{split}` stands for the split.
        split: The split of the hub, or of the procedural problems. A file or an iterable is taken whole.
        size: At most that many problems; None for all (procedural: 1,024).
        seed: Of the procedural problems.
        answer_format: Where the answer has to stand: `boxed`, `hash`, `xml`, or `auto` for any of them
            (verifiers.extraction says more).
        prompt_template: The user message with `{question}`; None for the question and an instruction on the
            format.
        kwargs: See ReasoningEnv.
    """

    hub: ClassVar[str]  # name of the data set
    dataset: ClassVar[str]  # its conventions: see pods_envs.verify
    instruction: ClassVar[str]  # the format asked for where answer_format is auto

    def __init__(
        self,
        *,
        source: str | Path | Iterable[Mapping[str, Any] | Problem] = "hub",
        split: str = "train",
        size: int | None = None,
        seed: int = 0,
        answer_format: str = "auto",
        prompt_template: str | None = None,
        **kwargs: Any,
    ):
        if answer_format != "auto" and answer_format not in INSTRUCTIONS:
            raise ValueError(f"answer_format={answer_format!r} is not one of auto, {', '.join(INSTRUCTIONS)}")
        self.asked_format = self.instruction if answer_format == "auto" else answer_format
        problems: Sequence[Problem]
        if isinstance(source, str) and source == "procedural":
            problems = _made_problems(self.make_problems, 1024 if size is None else size, split, seed)
        elif isinstance(source, (str, Path)):
            name = self.hub if source == "hub" else str(source).replace("{split}", split)
            problems = _read_problems(name, split, self.to_problem, _modified(name))[:size]
        else:
            problems = load_problems(source, split=split, to_problem=self.to_problem)[:size]
        if prompt_template is None:
            prompt_template = "{question}\n\n" + INSTRUCTIONS[self.asked_format]
        self.answer_format = answer_format
        verifier = AnswerVerifier(self.dataset, answer_format)
        super().__init__(problems, verifier, prompt_template=prompt_template, **kwargs)

    @classmethod
    def for_verification(cls, **kwargs: Any) -> ReasoningEnv:
        """The verifier needs no problems: nothing is read or downloaded."""
        return cls(**{**kwargs, "source": [Problem("", "0")], "size": None})

    @staticmethod
    def to_problem(row: Mapping[str, Any]) -> Problem:
        """A row of the original schema as a Problem."""
        raise NotImplementedError

    @staticmethod
    def make_problems(*, size: int, split: str, seed: int) -> list[Problem]:
        """Procedural problems in the manner of the data set, the same for the same arguments."""
        raise NotImplementedError

    def reference_response(self, problem: Problem) -> str:
        """The reference answer where the answer format wants it."""
        return _REFERENCE_RESPONSES[self.asked_format] % problem.answer

    async def verify_async(self, response: str, problem: Problem) -> Verdict:
        """`verify` for an event loop, which computer algebra does not block."""
        verdict = await verify_async(response, problem.answer, self.dataset, self.answer_format)
        return verdict.weighted(self.format_weight)

    def verify_many(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """`verify` for each pair, in order; what needs computer algebra runs on all workers at once."""
        golds = [problem.answer for problem in problems]
        verdicts = verify_many(responses, golds, self.dataset, self.answer_format)
        return [verdict.weighted(self.format_weight) for verdict in verdicts]


@once_per_process
def _made_problems(
    make: Callable[..., list[Problem]], size: int, split: str, seed: int
) -> tuple[Problem, ...]:
    return tuple(make(size=size, split=split, seed=seed))


@once_per_process
def _read_problems(
    source: str, split: str, to_problem: Callable[[Mapping[str, Any]], Problem], modified: float
) -> tuple[Problem, ...]:
    return tuple(load_problems(source, split=split, to_problem=to_problem))


def _modified(source: str) -> float:
    """When a local file was last written, so that a changed one is read again."""
    path = Path(source)
    return path.stat().st_mtime if path.is_file() else 0.0


def make_from(
    makers: Sequence[Callable[..., Problem]], name: str, *, size: int, split: str, seed: int
) -> list[Problem]:
    """`size` problems by randomly chosen makers, each called with a seeded `random.Random`."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is not 'train' or 'test'")
    rng = random.Random(f"pods/{name}/{split}/{seed}")
    return [rng.choice(makers)(rng) for _ in range(size)]
