"""The agent loop `pods_env` with a real tokenizer and verl's own token handling; only the engine is a stand-in."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed (pip install 'verl-pods[cpu]')")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from pods_plugin.cpu.models import build_tiny_model
from pods_plugin.integration.agent_loop import EnvAgentLoop
from pods_plugin.integration.data import write_parquet
from pods_plugin.integration.episodes import EpisodeError, EpisodeSettings, Task, check_files
from tests import text_envs

TALK = "tests.text_envs:tests/Talk-v0"
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("model")
    build_tiny_model(path, hidden_size=16, layers=1, heads=2)
    return AutoTokenizer.from_pretrained(path)


class Engine:
    """Says what it is told, one token a byte, with an end token; cut off at max_tokens as an engine does."""

    def __init__(self, tokenizer, *texts: str, log_probs: bool = True):
        self.tokenizer, self.texts, self.log_probs = tokenizer, list(texts), log_probs
        self.prompts: list[str] = []
        self.room: list[int] = []
        self.spoken: list[list[int]] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        self.room.append(sampling_params["max_tokens"])
        text = self.texts.pop(0)
        if text == "crash":
            raise ConnectionError("no engine")
        ids = [*self.tokenizer.encode(text), EOS][: self.room[-1]]
        self.spoken.append(ids)
        version = len(self.prompts)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-1.0 - i for i in range(len(ids))] if self.log_probs else None,
            num_preempted=0,
            extra_fields={"min_global_steps": version, "max_global_steps": version},
        )


def row(env_id: str = TALK, index: int = 7, split: str | None = None, **env_kwargs: Any) -> dict[str, Any]:
    extra = {"index": index, "env_kwargs": json.dumps(env_kwargs)}
    if split is not None:
        extra["split"] = split
    return {
        "data_source": env_id,
        "extra_info": extra,
        "raw_prompt": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "unused"}],
        "uid": "the-uid",
        "session_id": 3,
    }


def arithmetic(**kwargs: Any) -> dict[str, Any]:
    return row("pods/Arithmetic-v0", 5, "train", level=0, size=16, feedback="?", **kwargs)


async def play(
    engine: Engine,
    data: dict[str, Any],
    *,
    prompt: int = 32,
    response: int = 16,
    turns: int | None = None,
    **custom: Any,
):
    rollout = {
        "prompt_length": prompt,
        "response_length": response,
        "custom": {"pods_env": custom},
        "multi_turn": {"max_assistant_turns": turns},
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    loop = EnvAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=engine.tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
        tools=ToolListWrap([]),
    )
    return await loop.run({"temperature": 1.0}, **data)


def run(*args: Any, **kwargs: Any):
    return asyncio.run(play(*args, **kwargs))


def test_a_text_environment_without_problems_gets_rows_of_seeds(tokenizer, tmp_path):
    pandas = pytest.importorskip("pandas")
    written = write_parquet(TALK, tmp_path, sizes={"train": 4, "test": 2}, env_kwargs={"turns": 1})
    train, test = pandas.read_parquet(written["train"]), pandas.read_parquet(written["test"])
    assert [dict(message) for message in train.prompt[3]] == [{"role": "user", "content": "start 3"}]
    seeds = [extra["index"] for extra in [*train.extra_info, *test.extra_info]]
    assert len(set(seeds)) == 6
    engine = Engine(tokenizer, "a")
    (output,) = run(engine, {**train.iloc[3], "raw_prompt": list(train.prompt[3])})
    assert engine.prompts == ["start 3"] and len(output.response_ids) == 2


@pytest.fixture(autouse=True)
def _count_anew():
    text_envs.events.clear()
    text_envs.threads.clear()


def all_closed(made: int = 1) -> bool:
    deadline = time.monotonic() + 10
    while text_envs.events["closed"] < made and time.monotonic() < deadline:
        time.sleep(0.02)
    return text_envs.events == Counter(made=made, closed=made)


# --- what is trained on ----------------------------------------------------------------------------------------------


def test_an_episode_is_one_row_in_which_only_the_models_tokens_count(tokenizer):
    import gymnasium

    env = gymnasium.make("pods/Arithmetic-v0", level=0, size=16, split="train").unwrapped
    problem = env.problems[5]
    wrong = "19" if problem.answer != "19" else "18"
    engine = Engine(tokenizer, wrong, "", problem.answer)
    (output,) = run(engine, arithmetic(max_turns=3))
    conversation = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": wrong},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": problem.answer},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(output.prompt_ids + output.response_ids) == text
    assert tokenizer.decode(output.prompt_ids) == problem.question
    assert engine.prompts == [text.split(f"{wrong}<|im_end|>")[0], *(text[: m + 1] for m in _marks(text))]
    spoken = [token for ids in engine.spoken for token in ids]
    mask = output.response_mask
    assert [token for token, ours in zip(output.response_ids, mask, strict=True) if ours] == spoken
    masked = [token for token, ours in zip(output.response_ids, mask, strict=True) if not ours]
    assert tokenizer.decode(masked) == "\n?\n?"
    assert [p for p, ours in zip(output.response_logprobs, mask, strict=True) if ours] == [
        -1.0 - i for ids in engine.spoken for i in range(len(ids))
    ]
    assert all(p == 0.0 for p, ours in zip(output.response_logprobs, mask, strict=True) if not ours)
    assert engine.room == [16, 11, 8]
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {
        "num_turns": 3,
        "acc": 1.0,
        "format_ok": 1.0,
        "extracted": problem.answer,
        "method": "exact",
    }
    assert output.extra_fields["turn_scores"] == [0.0, 0.0, 1.0]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 3)
    assert output.num_turns == 6
    assert output.as_dict()["rm_scores"].tolist() == [0.0] * (len(mask) - 1) + [1.0]


def _marks(text: str) -> list[int]:
    return [i for i, character in enumerate(text) if character == "?"]


def test_all_attempts_wrong(tokenizer):
    (output,) = run(Engine(tokenizer, "99", "99"), arithmetic(max_turns=2))
    assert output.reward_score == 0.0
    assert output.extra_fields["reward_extra_info"]["acc"] == 0.0
    assert output.extra_fields["reward_extra_info"]["num_turns"] == 2


@pytest.mark.parametrize("env_id", ["pods/GSM8K-v0", "pods/MATH-v0"])
def test_a_second_attempt_at_a_word_problem(tokenizer, env_id):
    import gymnasium

    kwargs = {"source": "procedural", "size": 20, "max_turns": 3, "feedback": "No, {turns_left} left."}
    env = gymnasium.make(env_id, split="test", **kwargs).unwrapped
    right = env.reference_response(env.problems[5])
    engine = Engine(tokenizer, "I give up.", right)
    (output,) = run(engine, row(env_id, 5, "test", **kwargs), prompt=512, response=256)
    assert tokenizer.decode(output.response_ids) == f"I give up.<|im_end|>\nNo, 2 left.{right}<|im_end|>"
    assert output.reward_score == 1.0
    extra = output.extra_fields["reward_extra_info"]
    assert (extra["num_turns"], extra["acc"], extra["format_ok"]) == (2, 1.0, 1.0)


def test_rewards_of_the_turns_are_summed_and_the_row_says_where_the_episode_starts(tokenizer):
    engine = Engine(tokenizer, "a", "b", "c")
    (output,) = run(engine, row(turns=3, rewards=[0.25, -0.5, 2.0]), response=32)
    assert output.reward_score == 1.75
    assert output.extra_fields["reward_extra_info"] == {"num_turns": 3}
    # The system message of the row's prompt; of the user's the observation, seeded by the index.
    assert engine.prompts[0] == "Be brief. start 7"
    assert all_closed()


def test_truncation_ends_an_episode_as_termination_does(tokenizer):
    (output,) = run(Engine(tokenizer, "a", "b"), row(turns=2, truncate=True, rewards=[0.0, 1.0]))
    assert output.reward_score == 1.0 and all_closed()


def test_verls_limit_of_turns_holds(tokenizer):
    (output,) = run(Engine(tokenizer, "a", "b"), row(turns=99, rewards=[0.5, 0.5, 9.0]), turns=2)
    assert output.reward_score == 1.0 and output.num_turns == 4 and all_closed()


@pytest.mark.parametrize("log_probs", [True, False])
def test_a_response_that_takes_all_tokens_is_judged_and_ends_the_episode(tokenizer, log_probs):
    engine = Engine(tokenizer, "123456789", log_probs=log_probs)
    (output,) = run(engine, row(turns=99, rewards=[0.5]), response=6)
    assert tokenizer.decode(output.response_ids) == "123456"
    assert output.response_mask == [1] * 6 and output.reward_score == 0.5
    assert (output.response_logprobs is not None) == log_probs
    assert all_closed()


@pytest.mark.parametrize(("response", "turns"), [(6, 1), (7, 1), (8, 2)])
def test_an_answer_of_the_environment_that_leaves_no_room_is_left_out(tokenizer, response, turns):
    # a, its end, then the environment's "\n" and "word": seven tokens; the eighth is the model's.
    engine = Engine(tokenizer, "a", "bc")
    (output,) = run(engine, row(turns=99, observation="word"), response=response)
    expected = {1: "a<|im_end|>", 2: "a<|im_end|>\nwordb"}[turns]
    assert tokenizer.decode(output.response_ids) == expected
    assert output.response_mask[-1] == 1 and len(output.response_ids) <= response


def test_rows_of_turns(tokenizer):
    engine = Engine(tokenizer, "abc", "d")
    outputs = run(engine, row(turns=2, rewards=[0.25, 0.5]), rows="turn", response=4)
    assert [tokenizer.decode(o.response_ids) for o in outputs] == ["abc<|im_end|>", "d<|im_end|>"]
    assert [tokenizer.decode(o.prompt_ids) for o in outputs] == engine.prompts
    assert engine.room == [4, 4]
    assert all(o.response_mask == [1] * len(o.response_ids) for o in outputs)
    assert [o.reward_score for o in outputs] == [None, 0.75]
    assert all(set(o.extra_fields) >= {"turn_scores", "min_global_steps"} for o in outputs)


def test_rows_of_turns_end_where_the_prompt_is_full(tokenizer):
    data = row(turns=99, observation="1234")
    data["raw_prompt"] = []
    outputs = run(Engine(tokenizer, "x", "x", "x"), data, rows="turn", prompt=16)
    # "start 7", then seven tokens for each turn: x, its end, a newline, and the four of the environment
    assert [len(o.prompt_ids) for o in outputs] == [7, 14]


# --- environments that fail ------------------------------------------------------------------------------------------


FAILURES = [
    (("make", "raise"), "make of .* raised ValueError: broken make"),
    (("reset", "raise"), "reset of .* raised ValueError: broken reset"),
    (("step", "raise"), "step of .* raised ValueError: broken step"),
    (("step", "exit"), "step of .* raised SystemExit: 3"),
    (("step", "hang"), r"step of .* took more than 0.3 s \(actor_rollout_ref.rollout.custom.pods_env.step_timeout_s\)"),
    (("reset", "hang"), "reset of .* took more than 0.3 s"),
    (("reset", ([1, 2], {})), "reset of .* gave an observation of type list, expected a str"),
    (("reset", "text alone"), "reset of .* returned 'text alone', expected a tuple of 2"),
    (("step", ("", float("nan"), True, False, {})), "gave the reward nan, expected a finite number"),
    (("step", ("", "much", True, False, {})), "gave the reward 'much', expected a finite number"),
    (("step", (None, 0.0, False, False, {})), "step of .* observation of type NoneType"),
    (("step", ("", 0.0, True, {})), "step of .* returned .* expected a tuple of 5"),
]  # fmt: skip


@pytest.mark.parametrize(("failure", "words"), FAILURES, ids=[f"{m}-{k}" for (m, k), _ in FAILURES])
def test_a_failing_environment_gives_no_row_one_line_and_is_closed(
    tokenizer, caplog, failure, words, monkeypatch
):
    import gymnasium

    # Failures that JSON cannot carry.
    monkeypatch.setitem(gymnasium.spec("tests/Talk-v0").kwargs, "failure", failure)
    engine = Engine(tokenizer, "a", "b", "c")
    with caplog.at_level(logging.WARNING):
        assert run(engine, row(turns=3), step_timeout_s=0.3) == []
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "\n" not in lines[0], lines
    assert lines[0].startswith(
        "verl-pods: session 3 of prompt the-uid is dropped, the rest of its group goes on: "
    )
    assert re.search(words, lines[0]), lines[0]
    assert all_closed(made=0 if failure[0] == "make" else 1)


def test_a_slow_environment_does_not_hold_up_the_others(tokenizer):
    async def both():
        started = time.monotonic()
        slow = asyncio.create_task(
            play(Engine(tokenizer, "a"), row(failure=["step", "hang"], turns=1), step_timeout_s=60)
        )
        quick = [play(Engine(tokenizer, "a", "b"), row()) for _ in range(20)]
        outputs = await asyncio.gather(*quick)
        assert not slow.done()
        return outputs, await slow, time.monotonic() - started

    outputs, slow, seconds = asyncio.run(both())
    assert all(len(rows) == 1 for rows in outputs) and len(slow) == 1
    assert seconds >= 1.5
    assert all_closed(made=21)
    assert not any(name.startswith(("MainThread", "asyncio")) for name in text_envs.threads)


def test_an_engine_that_fails_is_verls_matter_and_the_environment_is_closed(tokenizer):
    with pytest.raises(ConnectionError):
        run(Engine(tokenizer, "a", "crash"), row(turns=3))
    assert all_closed()


def test_a_cancelled_session_closes_its_environment(tokenizer):
    async def cancel():
        task = asyncio.create_task(
            play(Engine(tokenizer, "a"), row(failure=["step", "hang"], turns=1), step_timeout_s=60)
        )
        while text_envs.events["made"] == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert all_closed()


def test_a_close_that_fails_costs_no_rollout(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        (output,) = run(Engine(tokenizer, "a"), row(turns=1, rewards=[1.0], failure=["close", "raise"]))
    assert output.reward_score == 1.0
    assert [r.getMessage() for r in caplog.records] == [
        f"verl-pods: session 3 of prompt the-uid: close of {TALK} raised ValueError: broken close"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra_info": None}, "pods data ENV_ID"),
        ({"extra_info": {"index": 0}}, "env_kwargs"),
        ({"extra_info": {"index": None, "env_kwargs": "{}"}}, "extra_info.index"),
        ({"extra_info": {"index": 0, "env_kwargs": "{"}}, "pods data ENV_ID"),
    ],
)
def test_a_row_that_pods_data_did_not_write(change, words):
    with pytest.raises(EpisodeError, match=words):
        Task.of({**row(), **change})


# --- settings and registration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step_timeout": 3}, "step_timeout is no setting of the loop; write one of step_timeout_s, rows"),
        ({"step_timeout_s": 0}, "step_timeout_s=0 is no positive number"),
        ({"step_timeout_s": "60"}, "step_timeout_s='60' is no positive number"),
        ({"step_timeout_s": float("inf")}, "step_timeout_s=inf is no positive number"),
        ({"step_timeout_s": True}, "step_timeout_s=True is no positive number"),
        ({"rows": "turns"}, "rows='turns' is not one of episode, turn"),
    ],
)
def test_settings_that_cannot_be_used(given, words):
    with pytest.raises(ValueError, match=words):
        EpisodeSettings.of({"pods_env": given})


def test_default_settings():
    assert (
        EpisodeSettings.of(None) == EpisodeSettings.of({"pods_env": None}) == EpisodeSettings(60.0, "episode")
    )


def test_data_of_an_environment_that_no_worker_finds(tmp_path):
    pandas = pytest.importorskip("pandas")
    known, unknown = tmp_path / "known.parquet", tmp_path / "unknown.parquet"
    pandas.DataFrame({"data_source": ["pods/Arithmetic-v0", TALK]}).to_parquet(known)
    pandas.DataFrame({"data_source": ["pods/Arithmetic-v0", "pods/Arithmetics-v0"]}).to_parquet(unknown)
    check_files([str(known), str(tmp_path / "absent.parquet"), "hdfs://elsewhere/x.parquet"])
    with pytest.raises(
        ValueError, match=r"unknown.parquet: data_source 'pods/Arithmetics-v0' is no registered"
    ):
        check_files([str(unknown)])


def test_verl_finds_the_loop_in_every_process_and_imports_it_late():
    code = (
        "import sys, verl\n"
        "assert 'verl.experimental.agent_loop' not in sys.modules\n"
        "from verl.experimental.agent_loop import agent_loop\n"
        "print(agent_loop._agent_loop_registry['pods_env']['_target_'], 'gymnasium' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [f"{EnvAgentLoop.__module__}.{EnvAgentLoop.__qualname__}", "False"]


def test_guard_verls_register_does_what_the_plugin_does(monkeypatch):
    from verl.experimental.agent_loop import agent_loop

    monkeypatch.setattr(agent_loop, "_agent_loop_registry", {})
    agent_loop.register("pods_env")(EnvAgentLoop)
    assert agent_loop._agent_loop_registry == {
        "pods_env": {"_target_": "pods_plugin.integration.agent_loop.EnvAgentLoop"}
    }


def test_guard_verl_takes_an_empty_session_for_a_short_group():
    from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

    source = inspect.getsource(AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess)
    assert "if not outputs:" in source
