"""verl's reward function for every registered environment: `data_source` is the environment's id.

reward.custom_reward_function.path=pkg://pods_plugin.integration.reward
reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import functools
import json
from typing import Any

from pods_envs import Problem, ReasoningEnv, env_class


@functools.lru_cache(maxsize=64)
def _environment(env_id: str, env_kwargs: str) -> ReasoningEnv:
    cls, registered = env_class(env_id)
    return cls.for_verification(**{**registered, **json.loads(env_kwargs)})


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The verdict of the environment `data_source` on a response. A coroutine: verl's reward loop awaits it.

    Returns:
        `score` (what is trained on) and, as reward_extra_info: `acc` (0 or 1), `format_ok`, `extracted`, `method`.
    """
    env = _environment(data_source, (extra_info or {}).get("env_kwargs") or "{}")
    verdict = await env.verify_async(solution_str, Problem(question="", answer=ground_truth))
    return {
        "score": verdict.reward,
        "acc": float(verdict.correct),
        "format_ok": float(verdict.format_ok),
        "extracted": verdict.extracted or "",
        "method": verdict.method,
    }
