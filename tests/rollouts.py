"""Rollouts as verl's agent loop writes them into TransferQueue, with rewards of our choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def put_rollouts(
    rewards: Mapping[str, Sequence[float | Sequence[float]]],
    *,
    partition: str = "train",
    seed: int = 0,
    vocabulary: int = 50,
    prompt_len: int = 5,
    response_lens: Sequence[int] = (1, 2, 3, 4),
    extra_info: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """Puts rows into TransferQueue and returns their KVBatchMeta.

    Args:
        rewards: uid -> the reward of each session; a sequence in place of a number makes a multi-row session with one
            row for each (verl gives every row of a session the session's reward, so give equal ones).
        extra_info: uid -> reward_extra_info of each session.
        response_lens: Response lengths, used in turn.
    """
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    generator = torch.Generator().manual_seed(seed)
    keys, fields, tags = [], [], []
    count = 0
    for uid, sessions in rewards.items():
        prompt = torch.randint(4, vocabulary, (prompt_len,), generator=generator)
        for session, value in enumerate(sessions):
            for index, reward in enumerate(value if isinstance(value, Sequence) else [value]):
                length = response_lens[count % len(response_lens)]
                count += 1
                response = torch.randint(4, vocabulary, (length,), generator=generator)
                ids = torch.cat([prompt, response])
                scores = torch.zeros(length)
                scores[-1] = reward
                info = {} if extra_info is None else dict(extra_info[uid][session])
                keys.append(f"{uid}_{session}_{index}")
                fields.append(
                    {
                        "uid": uid,
                        "prompts": prompt,
                        "responses": response,
                        "input_ids": ids,
                        "attention_mask": torch.ones_like(ids),
                        "position_ids": torch.arange(len(ids)),
                        "response_mask": torch.ones(length, dtype=torch.int64),
                        "loss_mask": torch.ones(length, dtype=torch.int64),
                        "rm_scores": scores,
                        "rollout_log_probs": -torch.rand(length, generator=generator),
                        "num_turns": 2,
                        "extra_fields": {"reward_extra_info": info},
                        "multi_modal_inputs": {},
                    }
                )
                tags.append(
                    {
                        "status": "success",
                        "prompt_len": prompt_len,
                        "response_len": length,
                        "seq_len": prompt_len + length,
                        "global_steps": 1,
                        "min_global_steps": 0,
                        "max_global_steps": 0,
                    }
                )
    tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id=partition)
    batch = KVBatchMeta(partition_id=partition, keys=keys, tags=tags)
    batch.extra_info["temperature"] = 1.0
    return batch


def keys_in_queue(partition: str = "train") -> set[str]:
    import transfer_queue as tq

    return set((tq.kv_list(partition) or {}).get(partition, {}))
