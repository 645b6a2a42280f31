"""The stage against a real TransferQueue."""

from __future__ import annotations

import math

import numpy as np
import pytest

tq = pytest.importorskip("transfer_queue")

from pods_plugin.downsampling import DownsampleConfig, DownsampleError
from pods_plugin.integration.stage import Sessions, downsample, read_metric
from tests.rollouts import keys_in_queue, put_rollouts


def settings(keep: int, n: int = 8, **kwargs) -> DownsampleConfig:
    return DownsampleConfig(**{"rule": "max_variance", "generated": n, "keep": keep, **kwargs})


def test_keeps_the_largest_variance_and_clears_the_rest(queue):
    rewards = {"a": [0.0, 0.1, 0.2, 0.9, 1.0, 0.5, 0.4, 0.3], "b": [5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, -5.0]}
    batch = put_rollouts(rewards)
    result = downsample(batch, settings(4), global_step=3)
    kept_a = {key for key in result.batch.keys if key.startswith("a_")}
    assert kept_a == {"a_0_0", "a_1_0", "a_3_0", "a_4_0"}
    assert "b_7_0" in result.batch.keys
    assert len(result.batch.keys) == 8
    assert keys_in_queue() == set(result.batch.keys)
    order = {key: i for i, key in enumerate(batch.keys)}
    assert [order[key] for key in result.batch.keys] == sorted(order[key] for key in result.batch.keys)
    assert result.batch.extra_info == batch.extra_info
    assert [tag["seq_len"] for tag in result.batch.tags] == [
        batch.tags[order[k]]["seq_len"] for k in result.batch.keys
    ]
    assert result.metrics["downsample/generated"] == 16
    assert result.metrics["downsample/kept"] == 8
    assert result.metrics["downsample/reward/mean_all"] == pytest.approx(
        np.mean(list(rewards.values())), abs=1e-6
    )
    assert result.rewards["b_7"] == -5.0


def test_the_order_of_arrival_changes_nothing(queue):
    rewards = {f"u{i}": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0] for i in range(6)}
    batch = put_rollouts(rewards)
    backwards = batch.select_keys(batch.keys[::-1])
    first = downsample(batch, settings(4), global_step=1)
    put_rollouts(rewards)
    second = downsample(backwards, settings(4), global_step=1)
    assert set(first.batch.keys) == set(second.batch.keys)
    put_rollouts(rewards)
    third = downsample(batch, settings(4), global_step=2)
    assert set(third.batch.keys) != set(
        first.batch.keys
    )  # 36 ** 6 choices of ties: another step, another one


def test_a_multi_row_session_is_kept_or_dropped_as_one(queue):
    rewards = {"a": [[0.0, 0.0, 0.0], 0.5, [1.0, 1.0], 0.5, 0.5, 0.5]}
    batch = put_rollouts(rewards)
    result = downsample(batch, settings(2, n=6), global_step=0)
    assert set(result.batch.keys) == {"a_0_0", "a_0_1", "a_0_2", "a_2_0", "a_2_1"}
    assert result.metrics["downsample/generated"] == 6
    assert result.metrics["downsample/kept"] == 2
    assert keys_in_queue() == set(result.batch.keys)


def test_the_reward_of_a_session_is_that_of_its_last_row(queue):
    batch = put_rollouts({"a": [[9.0, 0.0], [9.0, 1.0], [9.0, 0.5]]})
    sessions = Sessions.of(batch)
    assert read_metric(batch, sessions.last_rows, "reward").tolist() == [0.0, 1.0, 0.5]


def test_session_ten_comes_after_session_nine(queue):
    batch = put_rollouts({"a": [float(i) for i in range(12)]})
    sessions = Sessions.of(batch)
    assert sessions.names[9:] == ["a_9", "a_10", "a_11"]
    assert read_metric(batch, sessions.last_rows, "reward").tolist() == [float(i) for i in range(12)]


def test_a_short_group_keeps_what_is_there(queue):
    batch = put_rollouts({"a": [1.0, 0.0, 1.0], "b": [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]})
    result = downsample(batch, settings(4), global_step=0)
    assert sum(key.startswith("a_") for key in result.batch.keys) == 3
    assert sum(key.startswith("b_") for key in result.batch.keys) == 4


def test_padding_rows_pass_and_are_never_counted(queue):
    batch = put_rollouts({"a": [0.0, 1.0, 0.0, 1.0], "pad": [99.0, -99.0]})
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        tag["is_padding"] = key.startswith("pad")
    result = downsample(batch, settings(2, n=4), global_step=0)
    assert result.metrics["downsample/generated"] == 4
    assert {key for key in result.batch.keys if key.startswith("pad")} == {"pad_0_0", "pad_1_0"}
    assert result.metrics["downsample/reward/mean_all"] == 0.5


def test_a_metric_of_the_extra_info(queue):
    rewards = {"a": [0.0, 0.0, 0.0, 0.0]}
    info = {"a": [{"acc": 0.5}, {"acc": 1.0}, {"acc": True}, {"acc": 0}]}
    batch = put_rollouts(rewards, extra_info=info)
    result = downsample(batch, settings(2, n=4, metric="acc"), global_step=0)
    assert "a_3_0" in result.batch.keys and "a_0_0" not in result.batch.keys


def test_an_unknown_metric_names_those_there_are(queue):
    info = {"a": [{"acc": 1.0, "extracted": "x", "format_ok": 1.0}] * 4}
    batch = put_rollouts({"a": [0.0] * 4}, extra_info=info)
    with pytest.raises(DownsampleError) as caught:
        downsample(batch, settings(2, n=4, metric="accuracy"), global_step=0)
    assert "metric=accuracy is missing" in str(caught.value)
    assert str(caught.value).endswith("this reward gives: reward, acc, format_ok")
    with pytest.raises(DownsampleError, match="extracted is 'x', not a number"):
        downsample(batch, settings(2, n=4, metric="extracted"), global_step=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_names_the_prompt(queue, bad):
    batch = put_rollouts({"fine": [0.0, 1.0, 0.0, 1.0], "broken": [0.0, bad, 0.0, 1.0]})
    with pytest.raises(DownsampleError, match="broken"):
        downsample(batch, settings(2, n=4), global_step=0)
    assert len(keys_in_queue()) == 8  # nothing was dropped before the error


def test_groups_without_signal_can_be_left_out(queue):
    batch = put_rollouts({"flat": [1.0] * 4, "useful": [0.0, 1.0, 0.0, 0.0]})
    result = downsample(batch, settings(2, n=4, drop_zero_variance=True), global_step=0)
    assert {key.split("_")[0] for key in result.batch.keys} == {"useful"}
    assert result.metrics["downsample/zero_variance_groups"] == 1
    assert keys_in_queue() == set(result.batch.keys)


def test_a_step_without_any_signal_still_has_a_batch(queue):
    batch = put_rollouts({"flat": [1.0] * 4, "zero": [0.0] * 4})
    result = downsample(batch, settings(2, n=4, drop_zero_variance=True), global_step=0)
    assert len(result.batch.keys) == 4


def test_an_empty_response_counts_as_its_reward_zero(queue):
    batch = put_rollouts({"a": [0.25, 1.0, 0.5, 0.75]}, response_lens=(3, 1, 2))
    sessions = Sessions.of(batch)
    assert read_metric(batch, sessions.last_rows, "reward").tolist() == [0.25, 1.0, 0.5, 0.75]


def test_a_step_without_any_rollout_says_so():
    empty = tq.KVBatchMeta(partition_id="train", keys=[], tags=[])
    with pytest.raises(DownsampleError, match="step 7 has no rollout: all its sessions failed"):
        downsample(empty, settings(4), global_step=7)
