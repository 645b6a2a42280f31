"""`verify`: extract, clean, compare exactly, and only then ask computer algebra."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence

from pods_envs.base import Verdict
from pods_envs.verifiers.approximate import differ
from pods_envs.verifiers.comparison import Symbolic, UndecidedError, UnparsableError, equal, undecided
from pods_envs.verifiers.extraction import extract, last_box
from pods_envs.verifiers.latex import clean
from pods_envs.verifiers.pool import Budget, WorkerError, shared_pool
from pods_envs.verifiers.rational import MAX_LENGTH, TooLargeError

TIME_LIMIT = 2.0  # seconds of computer algebra for one response
LONG = 1000  # characters; a shorter text takes less than switching to a thread
DATASETS = ("gsm8k", "math", "math500")


def verify(
    response: str,
    gold: str,
    dataset: str = "math",
    answer_format: str = "auto",
    *,
    time_limit: float = TIME_LIMIT,
) -> Verdict:
    r"""Judges the final answer of a response. docs/verification.md has the conventions.

    Args:
        response: The model's text; any string.
        gold: The reference answer, or a whole solution that ends in `#### answer` or holds `\boxed{answer}`.
        dataset: `math`, `math500` or `gsm8k`. With `gsm8k` and `auto`, the single number of a finished last
            sentence counts as an answer if nothing better is there.
        answer_format: `auto`, `boxed`, `hash` or `xml`; see extraction.extract.
        time_limit: Seconds of computer algebra; only answers that exact comparison leaves open need any.

    Returns:
        The verdict with `reward` 1.0 or 0.0. It never raises for what the strings hold.

    Raises:
        ValueError: An unknown dataset or answer format.
    """
    verdict = _exact(response, gold, dataset, answer_format)
    return verdict if isinstance(verdict, Verdict) else verdict(time_limit)


def verify_many(
    responses: Sequence[str],
    golds: Sequence[str],
    dataset: str = "math",
    answer_format: str = "auto",
    *,
    time_limit: float = TIME_LIMIT,
) -> list[Verdict]:
    """`verify` for each pair, in order; what needs computer algebra runs on all workers at once.

    Raises:
        ValueError: Lengths that differ, an unknown dataset or answer format.
    """
    if len(responses) != len(golds):
        raise ValueError(
            f"{len(responses)} responses and {len(golds)} golds: there must be one gold a response"
        )
    verdicts = [_exact(*pair, dataset, answer_format) for pair in zip(responses, golds, strict=True)]
    if all(isinstance(verdict, Verdict) for verdict in verdicts):
        return verdicts  # type: ignore[return-value]
    threads = shared_pool().threads
    waiting = [v if isinstance(v, Verdict) else threads.submit(v, time_limit) for v in verdicts]
    return [verdict if isinstance(verdict, Verdict) else verdict.result() for verdict in waiting]


async def verify_async(
    response: str,
    gold: str,
    dataset: str = "math",
    answer_format: str = "auto",
    *,
    time_limit: float = TIME_LIMIT,
) -> Verdict:
    """`verify` for an event loop, which neither computer algebra nor a long response blocks."""
    import asyncio  # a fifth of the time that importing this package takes

    exact = functools.partial(_exact, response, gold, dataset, answer_format)
    loop = asyncio.get_running_loop()
    # Texts of 200,000 characters take up to 30 ms, and a hundred may be scored at once.
    long = len(response) + len(gold) >= LONG
    verdict = await loop.run_in_executor(shared_pool().one_thread, exact) if long else exact()
    if isinstance(verdict, Verdict):
        return verdict
    return await loop.run_in_executor(shared_pool().threads, verdict, time_limit)


def _exact(
    response: str, gold: str, dataset: str, answer_format: str
) -> Verdict | Callable[[float], Verdict]:
    """The verdict, or where exact comparison cannot tell, a function of the time limit that finds it."""
    if dataset not in DATASETS:
        raise ValueError(
            f"dataset={dataset!r} is not one of {', '.join(DATASETS)}; 'math' suits other sources too"
        )
    start = time.perf_counter()
    shared_pool().warm()  # so that the first answer that needs it need not wait for its imports
    answer, _, format_ok = extract(response, answer_format, last_number=dataset == "gsm8k")
    correct = False
    try:
        reference = _reference(gold)
        if answer is None:
            method = "no_answer"
        elif not reference:
            method = "no_reference"
        else:
            correct, method = _numeric(reference, answer)
    except UndecidedError:
        return functools.partial(_symbolic, reference, str(answer), format_ok, start)
    except Exception:  # a bug of ours must cost a reward, not a run
        method = "error"
    return Verdict(float(correct), correct, answer, method, time.perf_counter() - start, format_ok)


def _numeric(reference: str, answer: str) -> tuple[bool, str]:
    """Exact comparison, with floating point where that is enough to tell two values apart.

    Raises:
        UndecidedError: Only computer algebra can tell.
    """
    if answer.strip() == reference:
        return True, "exact"
    asked = False

    def ask(kind: str, gold: str, response: str) -> bool:
        nonlocal asked
        asked = True
        return not (kind == "value" and differ(gold, response)) and undecided(kind, gold, response)

    correct, method = _compare(reference, answer, ask)
    return correct, "numeric" if asked and method == "exact" else method


def _symbolic(reference: str, answer: str, format_ok: bool, start: float, time_limit: float) -> Verdict:
    budget = Budget(time_limit)

    def ask(kind: str, gold: str, response: str) -> bool:
        if kind == "value" and differ(gold, response):
            return False
        return bool(shared_pool().ask({"kind": kind, "gold": gold, "response": response}, budget))

    correct = False
    try:
        correct, method = _compare(reference, answer, ask)
        method = "symbolic" if method == "exact" else method
    except WorkerError as error:
        method = error.method
    except Exception:
        method = "error"
    return Verdict(float(correct), correct, answer, method, time.perf_counter() - start, format_ok)


def _compare(reference: str, answer: str, symbolic: Symbolic) -> tuple[bool, str]:
    answer = answer.strip()
    if len(answer) > MAX_LENGTH:
        return False, "too_large" if answer.isdecimal() else "unparsable"
    if re.match(r"~\s*\d", answer):  # about that much
        return False, "unparsable"
    cleaned = clean(answer)
    if not cleaned:
        return False, "no_answer"
    try:
        return equal(_clean_reference(reference), cleaned, symbolic), "exact"
    except TooLargeError:
        return False, "too_large"
    except (UnparsableError, RecursionError):
        return False, "unparsable"


_clean_reference = functools.lru_cache(maxsize=4096)(clean)  # a prompt's rollouts share one


def _reference(gold: str) -> str:
    """The answer of a reference that may be a whole solution."""
    return _last_answer(gold) if "box" in gold or "####" in gold else gold.strip()


@functools.lru_cache(maxsize=4096)
def _last_answer(gold: str) -> str:
    box = last_box(gold)
    if box is not None and box.answer is not None:
        gold = box.answer
    elif "####" in gold:
        gold = gold.rsplit("####", 1)[1]
    return gold.strip()
