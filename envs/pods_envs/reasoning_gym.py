"""`pods/reasoning-gym/TASK-v0`: the procedural tasks of the package reasoning-gym, with its own scorers.

reasoning-gym: Stojanovski et al. 2025, arXiv 2505.24760. Importing this module does not import it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, overload

from pods_envs.base import Problem, ReasoningEnv, Verdict
from pods_envs.verifiers.pool import Budget, WorkerError, shared_pool

INSTRUCTION = "{question}\n\nPut the final answer within <answer> and </answer>."
WORK = "reasoning_gym_worker.py"
TIME_LIMIT = 2.0  # seconds for one score

# Those of reasoning-gym 0.1.25; `composite`, which mixes others, is not among them.
# fmt: off
TASKS = (
    "ab", "acre", "advanced_geometry", "aiw", "arc_1d", "arc_agi", "base_conversion",
    "basic_arithmetic", "bf", "binary_alternation", "binary_matrix", "bitwise_arithmetic", "boxnet",
    "caesar_cipher", "calendar_arithmetic", "chain_sum", "circuit_logic", "codeio", "coin_flip",
    "color_cube_rotation", "complex_arithmetic", "count_bits", "count_primes", "countdown",
    "course_schedule", "cryptarithm", "decimal_arithmetic", "decimal_chain_sum", "dice",
    "emoji_mystery", "family_relationships", "figlet_font", "fraction_simplification", "futoshiki",
    "game_of_life", "game_of_life_halting", "gcd", "graph_color", "group_anagrams", "gsm_symbolic",
    "intermediate_integration", "isomorphic_strings", "jugs", "kakurasu", "knight_swap",
    "knights_knaves", "largest_island", "lcm", "leg_counting", "letter_counting", "letter_jumble",
    "list_functions", "mahjong_puzzle", "manipulate_matrix", "maze", "mini_sudoku", "modulo_grid",
    "n_queens", "needle_haystack", "number_filtering", "number_format", "number_sequence",
    "number_sorting", "palindrome_generation", "palindrome_partitioning", "path_star",
    "polynomial_equations", "polynomial_multiplication", "pool_matrix", "power_function",
    "prime_factorization", "products", "propositional_logic", "puzzle24", "quantum_lock", "ransom_note",
    "rearc", "rectangle_count", "rotate_matrix", "rotten_oranges", "rubiks_cube", "rush_hour",
    "self_reference", "sentence_reordering", "shortest_path", "simple_equations", "simple_geometry",
    "simple_integration", "sokoban", "spell_backward", "spiral_matrix", "string_insertion",
    "string_manipulation", "string_splitting", "string_synthesis", "sudoku", "survo", "syllogism",
    "time_intervals", "tower_of_hanoi", "tsumego", "word_ladder", "word_sequence_reversal",
    "word_sorting", "zebra_puzzles",
)
# fmt: on


class ReasoningGymEnv(ReasoningEnv):
    """Problems of one task of reasoning-gym. The reward is its scorer's, which may give partial credit.

    Args:
        task: Its name, such as `leg_counting`.
        split: `train` or `test`, made from different seeds.
        size: Number of problems; each is made when it is first asked for.
        seed: Makes another set of problems.
        config: Settings of the task, such as `{"min_animals": 3}`.
        prompt_template: See ReasoningEnv; the default asks for the answer in `<answer>` tags.
        kwargs: See ReasoningEnv.

    Raises:
        ModuleNotFoundError: reasoning-gym is not installed.
        ValueError: It has no such task, or the task no such setting.
    """

    def __init__(
        self,
        *,
        task: str,
        split: str = "train",
        size: int = 1024,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        prompt_template: str = INSTRUCTION,
        **kwargs: Any,
    ):
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r} is not 'train' or 'test'")
        # A problem of the task is made from its seed + index: near seeds would share problems.
        seed = random.Random(f"pods/reasoning-gym/{task}/{split}/{seed}").getrandbits(31)
        settings = {**(config or {}), "seed": seed, "size": size}
        problems = TaskProblems(task, settings)
        super().__init__(problems, TaskVerifier(task, settings), prompt_template=prompt_template, **kwargs)

    def reference_response(self, problem: Problem) -> str:
        """The reference answer in its tags."""
        return f"<answer>{problem.answer}</answer>"


class TaskProblems(Sequence[Problem]):
    """The problems of a task, each made when it is first asked for and kept."""

    def __init__(self, task: str, settings: Mapping[str, Any]):
        self.task, self.settings = task, dict(settings)
        self._dataset = _dataset(task, self.settings)
        self._made: dict[int, Problem] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskProblems, (self.task, self.settings)

    def __len__(self) -> int:
        return len(self._dataset)

    @overload
    def __getitem__(self, index: int) -> Problem: ...

    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        if index not in self._made:
            self._made[index] = _problem(self._dataset[index])
        return self._made[index]


@dataclasses.dataclass(frozen=True)
class TaskVerifier:
    """The task's own scorer, in a worker process: some evaluate an answer as Python or simplify it.

    Attributes:
        task: The task's name.
        settings: Its settings; some scorers read them.
    """

    task: str
    settings: Mapping[str, Any]

    def __call__(self, response: str, problem: Problem) -> Verdict:
        """The verdict on the last `<answer>` of `response`; correct is what gets the full score."""
        start = time.perf_counter()
        shared_pool(WORK).warm()
        answer = _last_answer(response)
        if answer is None:
            return Verdict(0.0, False, None, "no_answer", time.perf_counter() - start)
        request = {
            "task": self.task,
            "settings": self.settings,
            "answer": answer,
            "question": problem.question,
            "reference": problem.answer,
            "metadata": problem.info.get("metadata", "{}"),
        }
        try:
            score, method = float(shared_pool(WORK).ask(request, Budget(TIME_LIMIT))), "exact"
        except WorkerError as error:
            score, method = 0.0, error.method
        return Verdict(score, score >= 1.0, answer, method, time.perf_counter() - start, True)


def _last_answer(response: str) -> str | None:
    """What stands in the last closed pair of tags."""
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return response[start + len("<answer>") : end].strip() if start >= 0 else None


def _dataset(task: str, settings: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pods/reasoning-gym/{task}-v0 needs the package reasoning-gym ({error}): "
            "pip install 'verl-pods[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise ValueError(f"the installed reasoning-gym has no task {task!r}{hint}")
    try:
        return reasoning_gym.create_dataset(task, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        names = [field.name for field in dataclasses.fields(DATASETS[task][1])]
        raise ValueError(
            f"config={dict(settings)} does not suit the task {task} ({error}); its settings: {', '.join(names)}"
        ) from error


def _problem(entry: Mapping[str, Any]) -> Problem:
    metadata = entry["metadata"]
    answer = entry["answer"]
    if answer is None:  # several are right; some tasks hold one of them
        answer = metadata.get("example_answer") or metadata.get("example_correct_answer") or ""
        if "possible_answer" in metadata:
            answer = json.dumps(metadata["possible_answer"])
    # Tuples matter to some scorers and JSON has none, so Python's own notation where it is faithful. What neither
    # has (fractions in gsm_symbolic) only tells how the problem was made.
    literal = repr(metadata)
    try:
        faithful = ast.literal_eval(literal) == metadata
    except (ValueError, SyntaxError):
        faithful = False
    text = literal if faithful else json.dumps(metadata, default=str)
    return Problem(entry["question"], str(answer), {"metadata": text})
