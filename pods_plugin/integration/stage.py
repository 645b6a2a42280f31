"""The down-sampling stage: a step's rollouts in (KVBatchMeta), the kept ones out, the dropped ones cleared.

It reads one scalar a session from TransferQueue, selects on the host and clears what it dropped. No response, log-prob
or other large field of a rollout is moved.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from pods_plugin.downsampling import DownsampleConfig, DownsampleError, select_groups
from pods_plugin.downsampling.metrics import downsample_metrics


@dataclasses.dataclass(frozen=True)
class Sessions:
    """The sessions of a batch, in an order that does not depend on when they arrived.

    A session is one rollout of a prompt; in a multi-turn run it may have several rows. Keys of rows are
    `{uid}_{session}_{index}`.

    Attributes:
        uids: (sessions,) str, the prompt of each session.
        names: (sessions,) `{uid}_{session}`.
        last_rows: (sessions,) int64, the position in the batch of each session's last row, which holds its reward.
        row_session: (rows,) int64, the session of each row of the batch; -1 for a padding row.
    """

    uids: np.ndarray
    names: list[str]
    last_rows: np.ndarray
    row_session: np.ndarray

    @classmethod
    def of(cls, batch: KVBatchMeta) -> Sessions:
        """Groups the rows of a batch into sessions."""
        last: dict[tuple[str, int], tuple[int, int]] = {}  # (uid, session) -> (index, position)
        row_keys: list[tuple[str, int] | None] = []
        for position, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
            if tag.get("is_padding", False):
                row_keys.append(None)
                continue
            uid, session, index = key.rsplit("_", 2)
            name = (uid, int(session))
            row_keys.append(name)
            if name not in last or int(index) > last[name][0]:
                last[name] = (int(index), position)
        # Sorted by prompt and session number: the tie-break must not depend on which rollout finished first.
        ordered = sorted(last)
        number = {name: i for i, name in enumerate(ordered)}
        return cls(
            uids=np.array([uid for uid, _ in ordered], dtype=np.str_),
            names=[f"{uid}_{session}" for uid, session in ordered],
            last_rows=np.array([last[name][1] for name in ordered], dtype=np.int64),
            row_session=np.array([-1 if name is None else number[name] for name in row_keys], dtype=np.int64),
        )


def read_metric(batch: KVBatchMeta, positions: np.ndarray, metric: str) -> np.ndarray:
    """The value of `metric` for the rows at `positions` of a batch.

    `reward` is verl's outcome reward: the sum of `rm_scores` over the response, before any KL penalty. Another name is
    a key of the reward function's extra info, as in `algorithm.filter_groups.metric`.

    Returns:
        (len(positions),) float64.

    Raises:
        DownsampleError: A rollout has no such metric; the line names those it has.
    """
    keys = [batch.keys[i] for i in positions]
    if metric == "reward":
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])
        scores = data["rm_scores"]
        if not scores.is_nested:
            return scores.double().sum(dim=-1).numpy()
        # Vectorised over rows; a zero is appended since reduceat cannot start at the very end (an empty last row).
        offsets = scores.offsets().numpy()
        values = np.append(scores.values().double().numpy(), 0.0)
        sums = np.add.reduceat(values, offsets[:-1])
        return np.where(np.diff(offsets) > 0, sums, 0.0)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    result = np.empty(len(keys), dtype=np.float64)
    for i, extra in enumerate(data["extra_fields"]):
        extra = getattr(extra, "data", extra)
        info = extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {}
        try:
            result[i] = float(info[metric])
        except (KeyError, TypeError, ValueError):
            numeric = sorted(k for k, v in info.items() if isinstance(v, (bool, int, float, np.number)))
            found = f"is {info[metric]!r}, not a number," if metric in info else "is missing"
            raise DownsampleError(
                f"algorithm.downsample_kwargs.metric={metric} {found} for rollout {keys[i]}; "
                f"this reward gives: {', '.join(['reward', *numeric])}"
            ) from None
    return result


@dataclasses.dataclass(frozen=True)
class StageResult:
    """What the stage made of a batch.

    Attributes:
        batch: The kept rows, by prompt and session.
        metrics: The `downsample/*` metrics of the step.
        rewards: Session name -> value of the metric, for every session of the input (dropped ones too).
    """

    batch: KVBatchMeta
    metrics: dict[str, float]
    rewards: dict[str, float]


def downsample(batch: KVBatchMeta, config: DownsampleConfig, global_step: int) -> StageResult:
    """Keeps `config.keep` sessions of each prompt and clears the rows of the others from TransferQueue.

    Args:
        batch: All rollouts of the step, rewards known. Groups may be short (failed sessions).
        config: The resolved settings.
        global_step: Part of the tie-break's seed, so that equal rewards are not decided alike at each step.

    Raises:
        DownsampleError: A reward is NaN or infinite (the uid is named), the metric is missing, or the rule of the
            user returned something that is no selection; or no rollout of the step came back.
    """
    start = time.perf_counter()
    if not batch.keys:
        raise DownsampleError(
            f"step {global_step} has no rollout: all its sessions failed, for reasons that stand further up in the log"
        )
    sessions = Sessions.of(batch)
    rewards = read_metric(batch, sessions.last_rows, config.metric)
    kept = select_groups(
        rewards,
        sessions.uids,
        keep=config.keep,
        rule=config.rule,
        seed=(config.seed, global_step),
        drop_zero_variance=config.drop_zero_variance,
    )
    if not kept.any():
        # Every group was without signal. verl cannot train on an empty batch, so the step is run as without
        # drop_zero_variance: advantages are zero, only KL and entropy terms (if any) move the policy.
        kept = select_groups(
            rewards, sessions.uids, keep=config.keep, rule=config.rule, seed=(config.seed, global_step)
        )
    keep_row = (sessions.row_session < 0) | kept[sessions.row_session]
    dropped_keys = [key for key, keep in zip(batch.keys, keep_row, strict=True) if not keep]
    if dropped_keys:
        tq.kv_clear(keys=dropped_keys, partition_id=batch.partition_id)
    metrics = downsample_metrics(
        rewards,
        sessions.uids,
        kept,
        response_lengths=_response_lengths(batch, sessions),
        select_seconds=time.perf_counter() - start,
    )
    return StageResult(
        batch=batch.select_keys(_kept_keys(batch, sessions, keep_row, config)),
        metrics=metrics,
        rewards=dict(zip(sessions.names, rewards.tolist(), strict=True)),
    )


def _kept_keys(
    batch: KVBatchMeta, sessions: Sessions, keep_row: np.ndarray, config: DownsampleConfig
) -> list[str]:
    """The keys of the kept rows, by prompt and session: verl cuts mini-batches in this order, and that of arrival would
    make two runs with one seed differ. Where all rows are kept they stay as they are, as in verl without the plugin."""
    rows = np.flatnonzero(keep_row)
    if not config.identity:
        rows = rows[np.argsort(sessions.row_session[rows], kind="stable")]
    return [batch.keys[row] for row in rows]


def _response_lengths(batch: KVBatchMeta, sessions: Sessions) -> np.ndarray:
    """(sessions,) tokens of response, summed over the rows of a session."""
    lengths = np.array([tag.get("response_len", 0) for tag in batch.tags], dtype=np.float64)
    real = sessions.row_session >= 0
    return np.bincount(sessions.row_session[real], weights=lengths[real], minlength=len(sessions.names))
