"""A gymnasium text environment as a verl agent loop: reset, generate, step, ... to the end of the episode.

actor_rollout_ref.rollout.agent.default_agent_loop=pods_env
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer

from pods_plugin.integration.episodes import (
    Episode,
    EpisodeError,
    EpisodeSettings,
    Task,
    Turn,
    first_messages,
    outcome,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Row:
    """A sequence to train on, as far as it is known.

    Attributes:
        ids: Prompt and response so far.
        mask: Of the response: 1 for tokens of the model, 0 for those of the environment.
        log_probs: Beside `mask`, 0.0 where the model did not speak; None if the engine gives none.
        routed_experts: What the engine says of a mixture-of-experts model, for router replay.
    """

    ids: list[int]
    mask: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] | None = None
    routed_experts: Any = None


class EnvAgentLoop(AgentLoopBase):
    """Plays the environment that the row names (docs/environments.md, "Multi-turn").

    verl makes one for each session. A session whose environment fails gives no row at all, which verl and the
    down-sampling stage take for a shorter group; that of a failing engine raises, as in verl's own loops.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = EpisodeSettings.of(self.rollout_config.get("custom"))
        self.prompt_length: int = self.rollout_config.prompt_length
        self.response_length: int = self.rollout_config.response_length
        self.max_turns: int | None = self.rollout_config.multi_turn.max_assistant_turns

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """One session.

        Returns:
            Its rows: one, or with `rows: turn` one for each response; none if the environment failed.
        """
        session = f"session {kwargs.get('session_id')} of prompt {kwargs.get('uid')}"
        try:
            episode = Episode(Task.of(kwargs), self.settings.step_timeout_s)
            try:
                return await self._play(episode, sampling_params, kwargs["raw_prompt"])
            finally:
                try:
                    await episode.close()
                except EpisodeError as error:
                    logger.warning("verl-pods: %s: %s", session, error)  # its rollout is as good as any
        except EpisodeError as error:
            logger.warning("verl-pods: %s is dropped, the rest of its group goes on: %s", session, error)
            return []

    async def _play(
        self, episode: Episode, sampling_params: dict[str, Any], prompt: Any
    ) -> list[AgentLoopOutput]:
        metrics: dict[str, Any] = {}
        versions: dict[str, Any] = {}
        with simple_timer("tool_calls", metrics):
            observation, info = await episode.reset()
        messages = first_messages(observation, info, prompt)
        rows = [Row(await self.ct_build_initial_tokens(messages))]
        turns: list[Turn] = []
        request_id = uuid4().hex  # one for all turns: they go to the same server, which has their prefix
        while True:
            with simple_timer("generate_sequences", metrics):
                response = await self._generate(request_id, rows[-1], sampling_params, metrics, versions)
            with simple_timer("tool_calls", metrics):
                turns.append(await episode.step(response))
            if turns[-1].ended or len(turns) == self.max_turns:
                break
            answered = [*messages, {"role": "assistant", "content": response}]
            messages = [*answered, {"role": "user", "content": turns[-1].observation}]
            row = await self._next_row(rows[-1], answered, messages)
            if row is None:
                break
            rows = [*rows, row] if self.settings.rows == "turn" else [row]
        reward, extra = outcome(turns)
        outputs = [self._output(row, len(turns), metrics, versions, turns) for row in rows]
        # verl gives the other rows of the session what the last one has.
        outputs[-1].reward_score = reward
        outputs[-1].extra_fields["reward_extra_info"] = extra
        return outputs

    async def _generate(
        self,
        request_id: str,
        row: Row,
        sampling_params: dict[str, Any],
        metrics: dict[str, Any],
        versions: dict[str, Any],
    ) -> str:
        """Lets the model speak, as long as there is room in the row; what it says is appended to the row."""
        room = self.response_length - len(row.mask)
        output = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=row.ids,
            sampling_params={**sampling_params, "max_tokens": room},
        )
        tokens = output.token_ids[:room]  # TensorRT-LLM's server sets a limit of its own
        if not tokens:
            raise RuntimeError("the rollout engine returned no token")
        if output.num_preempted is not None:
            metrics["num_preempted"] = metrics.get("num_preempted", 0) + output.num_preempted
        # The weights may change during an episode of an asynchronous run: verl wants the first and the last version.
        versions.setdefault("min_global_steps", output.extra_fields.get("min_global_steps"))
        versions["max_global_steps"] = output.extra_fields.get("max_global_steps")
        log_probs = output.log_probs[:room] if output.log_probs else None
        merged, row.mask, row.log_probs = await self.ct_merge_assistant_token(
            row.ids,
            tokens,
            row.mask,
            None if log_probs is None else (row.log_probs or []),
            assistant_logprobs=log_probs,
        )
        row.ids = merged.token_ids
        row.routed_experts = output.routed_experts
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    async def _next_row(
        self, row: Row, answered: list[dict[str, Any]], messages: list[dict[str, Any]]
    ) -> Row | None:
        """The row with the environment's answer; None if the model has no token left to reply to it."""
        if self.settings.rows == "turn":
            ids = await self.loop.run_in_executor(
                None, lambda: self.continuous_token_builder.build_initial_tokens(messages)
            )
            return Row(ids) if len(ids) <= self.prompt_length else None
        merged, mask, log_probs = await self.ct_merge_context_msg(
            answered, messages, row.ids, row.mask, row.log_probs
        )
        if len(mask) >= self.response_length:
            return None
        return dataclasses.replace(row, ids=merged.token_ids, mask=mask, log_probs=log_probs)

    def _output(
        self, row: Row, turns: int, metrics: dict[str, Any], versions: dict[str, Any], history: list[Turn]
    ) -> AgentLoopOutput:
        start = len(row.ids) - len(row.mask)
        return AgentLoopOutput(
            prompt_ids=row.ids[:start],
            response_ids=row.ids[start:],
            response_mask=row.mask,
            response_logprobs=row.log_probs,
            routed_experts=row.routed_experts,
            num_turns=2 * turns,  # verl counts the messages of both sides
            metrics=metrics,
            extra_fields={
                **versions,
                "turn_scores": [turn.reward for turn in history],
                "tool_rewards": [],
            },
        )
