"""verl's reward function for every registered environment: `data_source` is the environment's id.

reward.custom_reward_function.path=pkg://pods_plugin.integration.reward
reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

from pods_envs import Problem, ReasoningEnv, Verdict, env_class

logger = logging.getLogger(__name__)

_environments: dict[tuple[str, str], ReasoningEnv] = {}
_making = threading.Lock()


def _environment(env_id: str, env_kwargs: str) -> ReasoningEnv:
    with _making:  # the first batch asks a hundred times at once
        if (env_id, env_kwargs) not in _environments:
            cls, registered = env_class(env_id)
            made = cls.for_verification(**{**registered, **json.loads(env_kwargs)})
            _environments[env_id, env_kwargs] = made
        return _environments[env_id, env_kwargs]


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The verdict of the environment `data_source` on a response. A coroutine: verl's reward loop awaits it.

    A verifier that raises costs the response its reward, not the run its life; the log says so.

    Returns:
        `score` (what is trained on) and, as reward_extra_info: `acc` (0 or 1), `format_ok`, `extracted`, `method`.
    """
    extra = extra_info or {}
    key = (data_source, extra.get("env_kwargs") or "{}")
    env = _environments.get(key)
    if env is None:  # making one may import a package or read a file: not in the event loop
        env = await asyncio.to_thread(_environment, *key)
    info = json.loads(extra.get("info") or "{}")
    problem = Problem(question=extra.get("question") or "", answer=ground_truth, info=info)
    try:
        verdict = await env.verify_async(solution_str, problem)
    except Exception:
        logger.exception(
            "verl-pods: the verifier of %s raised, the response gets no reward (pods check-env %s finds such "
            "errors)",
            *(data_source, data_source),
        )
        verdict = Verdict(0.0, False, None, "error")
    return {
        "score": verdict.reward,
        "acc": float(verdict.correct),
        "format_ok": float(verdict.format_ok),
        "extracted": verdict.extracted or "",
        "method": verdict.method,
    }
