"""The reward function in the event loop that verl awaits it in, and in a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from pathlib import Path

import gymnasium
import pytest
from pods_envs import Problem, ReasoningEnv, Verdict
from pods_envs.verifiers import close_pool

from pods_plugin.integration import reward
from pods_plugin.integration.reward import compute_score
from tests.envs.verifiers.test_robustness import BOMBS

EASY = r"\boxed{x+1}"


def _raises(response: str, problem: Problem) -> Verdict:
    raise RuntimeError("cannot judge this")


class Raises(ReasoningEnv):
    def __init__(self, **kwargs):
        super().__init__([Problem("?", "x")], _raises, **kwargs)


class KnowsInfo(ReasoningEnv):
    made = 0
    threads: set[int] = set()  # noqa: RUF012

    def __init__(self, **kwargs):
        type(self).made += 1
        self.threads.add(threading.get_ident())
        time.sleep(0.05)
        super().__init__([Problem("?", "x", {"bonus": 0.5})], self.judge, **kwargs)

    def judge(self, response: str, problem: Problem) -> Verdict:
        credit = problem.info["bonus"] if response == problem.question else 0.0
        return Verdict(credit, False, response, "exact", format_ok=True)


for cls in (Raises, KnowsInfo):
    gymnasium.register(f"reward-test/{cls.__name__}-v0", entry_point=cls)


async def _ticks(gaps: list[tuple[float, float]]) -> None:
    while True:
        wall, used, queued = time.perf_counter(), time.thread_time(), _queued()
        await asyncio.sleep(0.005)
        wall, used, queued = time.perf_counter() - wall, time.thread_time() - used, _queued() - queued
        gaps.append((wall - queued, used))


def _queued() -> float:
    """Seconds that threads of this process waited for a core, with the GIL or for it: a busy machine's doing."""
    waits = [0.0]
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            waits.append(int(file.read_text().split()[1]) / 1e9)
    return sum(waits)


def test_the_event_loop_is_never_blocked_while_bombs_are_scored():
    """Not for 100 ms, from a cold start: no environment is made, no worker runs."""

    async def main() -> tuple[list[dict], list[tuple[float, float]]]:
        gaps: list[tuple[float, float]] = []
        ticking = asyncio.create_task(_ticks(gaps))
        await asyncio.sleep(0.02)
        requests = [
            (env_id, bomb, "x") for bomb in BOMBS.values() for env_id in ("pods/MATH-v0", "pods/GSM8K-v0")
        ]
        requests += [("pods/MATH-v0", EASY, "1+x")] * 20
        results = await asyncio.gather(*(compute_score(*request) for request in requests))
        ticking.cancel()
        return results, gaps

    longest = []
    for _ in range(3):
        close_pool()
        reward._environments.clear()
        gc.collect()
        gc.freeze()  # what earlier tests left takes the collector a second, in whatever thread it starts
        try:
            results, gaps = asyncio.run(main())
        finally:
            gc.unfreeze()
        assert [result["acc"] for result in results[-20:]] == [1.0] * 20
        assert not any(result["acc"] or result["method"] == "error" for result in results[:-20])
        assert len(gaps) > 20
        longest.append((max(wall for wall, _ in gaps), max(used for _, used in gaps)))
    # Of three: a busy machine keeps any process waiting.
    assert min(wall for wall, _ in longest) < 0.1, f"(passed, computed by the loop itself): {longest}"
    assert min(used for _, used in longest) < 0.1, f"(passed, computed by the loop itself): {longest}"


def test_an_environment_is_made_once_and_not_in_the_event_loop():
    async def main() -> list[dict]:
        env_kwargs = json.dumps({"render_mode": "ansi"})
        extra = {"env_kwargs": env_kwargs, "question": "said", "info": json.dumps({"bonus": 0.25})}
        score = compute_score("reward-test/KnowsInfo-v0", "said", "x", extra)
        return await asyncio.gather(
            score, *(compute_score("reward-test/KnowsInfo-v0", "", "x", extra) for _ in range(9))
        )

    results = asyncio.run(main())
    assert results[0]["score"] == 0.25  # question, info and partial credit arrive
    assert {result["score"] for result in results[1:]} == {0.0}
    assert KnowsInfo.made == 1 and threading.get_ident() not in KnowsInfo.threads


def test_a_verifier_that_raises_costs_the_reward_and_is_logged(caplog):
    result = asyncio.run(compute_score("reward-test/Raises-v0", "x", "x"))
    assert result == {"score": 0.0, "acc": 0.0, "format_ok": 0.0, "extracted": "", "method": "error"}
    assert "the verifier of reward-test/Raises-v0 raised" in caplog.text
    assert "RuntimeError: cannot judge this" in caplog.text


def test_unknown_data_sources_are_errors():
    with pytest.raises(gymnasium.error.NamespaceNotFound, match="found as module:openai/gsm8k-v0"):
        asyncio.run(compute_score("openai/gsm8k-v0", "x", "x"))


def test_in_a_ray_actor(ray_cluster):
    """An asynchronous actor, as verl's reward workers are; ids with a module are found there."""
    import ray

    @ray.remote
    class Worker:
        async def score(self, *arguments):
            from pods_plugin.integration.reward import compute_score

            return await compute_score(*arguments)

    worker = Worker.remote()
    requests = [
        ("pods/MATH-v0", EASY, "1+x"),
        ("pods/MATH-v0", BOMBS["symbolic tower"], "x"),
        ("pods/GSM8K-v0", "#### 7", "7"),
        ("tests.envs.checked_envs:checked/info-v0", " red ", "red", {"info": json.dumps({"number": 1})}),
        ("tests.envs.checked_envs:checked/Good-v0", "blue", "red"),
    ]
    results = ray.get([worker.score.remote(*request) for request in requests], timeout=300)
    assert [result["acc"] for result in results] == [1.0, 0.0, 1.0, 1.0, 0.0]
    ray.kill(worker)


def test_tasks_of_reasoning_gym_from_their_data_files(tmp_path):
    pytest.importorskip("reasoning_gym", reason="pip install 'verl-pods[reasoning-gym]'")
    pandas = pytest.importorskip("pandas")
    from pods_plugin.integration.data import write_parquet

    env_id = "pods/reasoning-gym/propositional_logic-v0"  # several answers are right, and some half right
    env_kwargs = {"config": {"min_vars": 2, "max_vars": 2}, "size": 5, "format_weight": 0.2}
    written = write_parquet(env_id, tmp_path, env_kwargs=env_kwargs)
    for row in pandas.read_parquet(written["test"]).itertuples():
        gold = row.reward_model["ground_truth"]
        for response, score, acc in ((f"<answer>{gold}</answer>", 1.0, 1.0), (gold, 0.0, 0.0)):
            result = asyncio.run(compute_score(row.data_source, response, gold, row.extra_info))
            assert (result["score"], result["acc"]) == (pytest.approx(score), acc)
        wrong = asyncio.run(compute_score(row.data_source, "<answer>Q</answer>", gold, row.extra_info))
        assert 0.2 < wrong["score"] < 1 and wrong["acc"] == 0.0  # for the form, and for a part of it
