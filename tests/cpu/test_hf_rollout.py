from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pods_plugin.cpu import hf_rollout
from pods_plugin.cpu.generation import GenerationResult
from pods_plugin.cpu.hf_rollout import HFReplica, HFServer, HFServerAdapter, RolloutTimeoutError
from tests.cpu.helpers import EOS, full_log_probs, make_model

LOG_PROBS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def make_server(replica_rank: int = 0, model: Any = None, **config: Any) -> HFServer:
    """A server without Ray."""
    settings = {
        "seed": 42,
        "max_num_seqs": 64,
        "prompt_length": 16,
        "response_length": 8,
        "max_model_len": None,
        "ignore_eos": False,
    }
    server = object.__new__(HFServer)
    tokenizer = SimpleNamespace(eos_token_id=EOS, pad_token_id=0)
    server._setup(SimpleNamespace(**{**settings, **config}), model or make_model(), tokenizer, replica_rank)
    return server


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(scenario(), 30)

    return asyncio.run(limited())


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in model.state_dict().items()]


class SlowGenerator:
    """Stands in for the generator: takes its time, and returns the weight it saw at its start and its end."""

    def __init__(self, weight: torch.Tensor, seconds: float) -> None:
        self.weight, self.seconds, self.batches = weight, seconds, 0

    def generate(self, requests: list, *, abort: Any, on_token: Any) -> list[GenerationResult]:
        self.batches += 1
        start, until = self.weight.view(-1)[0].item(), time.monotonic() + self.seconds
        while time.monotonic() < until and not abort.is_set():
            time.sleep(0.005)
        ends = [start, self.weight.view(-1)[-1].item()]
        reason = "aborted" if abort.is_set() else "length"
        return [GenerationResult(token_ids=[7], log_probs=ends, stop_reason=reason) for _ in requests]


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PODS_CPU_TIMEOUT_S", "0.3")
    yield


# --- generation ---


def test_generates_as_verl_asks() -> None:
    server = make_server()

    async def scenario() -> list:
        await server.ready()
        await server.set_global_steps(3)
        return await asyncio.gather(
            *[server.generate([5, 6, 7], dict(LOG_PROBS), request_id=str(i), priority=0) for i in range(6)]
        )

    outputs = run(scenario)
    for output in outputs:
        assert 1 <= len(output.token_ids) <= 8 and output.stop_reason == "completed"
        assert output.extra_fields["global_steps"] == 3
        expected = full_log_probs(server.model, [5, 6, 7, *output.token_ids], 3, 1.0)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    assert [output.extra_fields["finish_reason"] for output in outputs] == [
        "completed" if output.token_ids[-1] == EOS else "length" for output in outputs
    ]


def test_log_probs_only_when_asked_for() -> None:
    async def scenario() -> Any:
        server = make_server()
        await server.ready()
        return await server.generate([5], {"temperature": 1.0}, request_id="a")

    assert run(scenario).log_probs is None


def rollouts(server: HFServer, prompts: list[list[int]], **parameters: Any) -> list[list[int]]:
    async def scenario() -> list[list[int]]:
        await server.ready()
        outputs = await asyncio.gather(
            *[server.generate(p, {**LOG_PROBS, **parameters}, request_id="r") for p in prompts]
        )
        return [output.token_ids for output in outputs]

    return run(scenario)


def test_seeds() -> None:
    prompts = [[5, 6, 7]] * 4 + [[8, 9]] * 4
    settings = {"temperature": 1.5, "ignore_eos": True}
    first = rollouts(make_server(), prompts, **settings)
    assert first == rollouts(make_server(), prompts, **settings)  # a run repeats
    assert first == rollouts(make_server(max_num_seqs=3), prompts, **settings)  # however it is batched
    assert len({tuple(tokens) for tokens in first}) == 8  # every rollout is its own
    other_replica = rollouts(make_server(replica_rank=1), prompts, **settings)
    other_seed = rollouts(make_server(seed=43), prompts, **settings)
    assert not {tuple(tokens) for tokens in first} & {tuple(tokens) for tokens in other_replica}
    assert not {tuple(tokens) for tokens in first} & {tuple(tokens) for tokens in other_seed}
    given = rollouts(make_server(), prompts, **settings, seed=7)
    assert len({tuple(tokens) for tokens in given}) == 2 and given == rollouts(
        make_server(1), prompts, **settings, seed=7
    )


def test_the_turns_of_a_session_draw_differently() -> None:
    server = make_server()
    first, second = (server._request(prompt, {"seed": 7}).seed for prompt in ([5, 6], [5, 6, 7]))
    assert first != second
    assert server._request([5, 6], {"seed": 7}).seed == first
    assert server._request([5, 6], {"seed": 8}).seed != first


def test_a_new_weight_version_has_new_seeds() -> None:
    server = make_server()
    seeds = [server._next_seed([5]), server._next_seed([5])]

    async def sync(steps: int) -> None:
        await server.begin_weight_sync(steps)
        await server.load_weights(weights_of(server.model))
        await server.end_weight_sync()

    run(lambda: sync(1))
    seeds += [server._next_seed([5]), server._next_seed([5])]
    assert len(set(seeds)) == 4
    again = make_server()
    run(lambda: again.set_global_steps(1))
    assert again._next_seed([5]) == seeds[2]  # counted from the sync on, so that a resumed run draws the same


def test_batches_are_bounded_by_rows_and_by_cache() -> None:
    for config, cache, most in (({"max_num_seqs": 5}, None, 5), ({}, 4 * (3 + 8), 4)):
        server = make_server(**config)
        if cache is not None:
            server.max_cache_tokens = cache
        sizes = []
        generate = server.generator.generate

        def spy(requests: list, _generate: Any = generate, _sizes: list = sizes, **kwargs: Any) -> list:
            _sizes.append(len(requests))
            return _generate(requests, **kwargs)

        server.generator.generate = spy  # type: ignore[method-assign, assignment]
        rollouts(server, [[5, 6, 7]] * 12)
        assert max(sizes) == most and sum(sizes) == 12


def test_max_tokens() -> None:
    server = make_server(max_model_len=10)

    def limit(length: int, **parameters: Any) -> int:
        return server._request([5] * length, parameters).max_tokens

    assert limit(4) == 6  # max_model_len
    assert limit(2) == 8  # response_length
    assert limit(2, max_tokens=3) == 3
    assert limit(2, max_new_tokens=3) == 3
    assert limit(2, max_tokens=0) == 1  # as verl's vLLM server does
    assert make_server()._request([5] * 20, {}).max_tokens == 4  # prompt_length + response_length - prompt


@pytest.mark.parametrize(
    ("prompt", "parameters", "extra", "message"),
    [
        ([5], {"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1; leave it at 1.0"),
        ([5], {"beams": 3}, {}, r"does not know the sampling parameters \['beams'\]"),
        ([5], {"top_p": 2.0}, {}, "top_p=2.0"),
        ([], {}, {}, "prompt_ids is empty"),
        ([5] * 128, {}, {}, "leaves no room to answer within rollout.max_model_len=128"),
        ([5], {}, {"image_data": ["x"]}, "serves text only"),
    ],
)
def test_bad_requests(prompt: list[int], parameters: dict, extra: dict, message: str) -> None:
    async def scenario() -> None:
        server = make_server()
        await server.ready()
        await server.generate(prompt, parameters, request_id="a", **extra)

    with pytest.raises(ValueError, match=message):
        run(scenario)


def test_an_error_in_a_batch_reaches_its_callers_and_the_server_goes_on() -> None:
    server = make_server()
    generate = server.generator.generate

    def fails(*args: Any, **kwargs: Any) -> Any:
        server.generator.generate = generate  # type: ignore[method-assign]
        raise FloatingPointError("diverged")

    server.generator.generate = fails  # type: ignore[method-assign, assignment]

    async def scenario() -> Any:
        await server.ready()
        with pytest.raises(FloatingPointError, match="diverged"):
            await server.generate([5], dict(LOG_PROBS), request_id="a")
        return await server.generate([5], dict(LOG_PROBS), request_id="b")

    assert run(scenario).token_ids


# --- weights ---


def test_new_weights_are_used() -> None:
    server, trained = make_server(), make_model()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)

    async def scenario() -> Any:
        await server.ready()
        await server.begin_weight_sync(5)
        await server.load_weights(weights_of(trained))
        await server.end_weight_sync()
        return await server.generate([5, 6], dict(LOG_PROBS), request_id="a")

    output = run(scenario)
    assert output.extra_fields["global_steps"] == 5
    expected = full_log_probs(trained, [5, 6, *output.token_ids], 2, 1.0)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)


def test_tied_weights_come_under_either_name_or_both() -> None:
    from transformers import Qwen2ForCausalLM

    config = make_model().config
    config.tie_word_embeddings = True
    model = Qwen2ForCausalLM(config).eval()
    names = {name for name, _ in weights_of(model)}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names
    for left_out in (None, "lm_head.weight", "model.embed_tokens.weight"):
        server = make_server(model=model)

        async def scenario(server: HFServer = server, left_out: str | None = left_out) -> None:
            await server.begin_weight_sync()
            await server.load_weights([(n, t) for n, t in weights_of(model) if n != left_out])
            await server.end_weight_sync()

        run(scenario)


def test_weights_that_do_not_fit_are_an_error() -> None:
    async def sync(weights: list[tuple[str, torch.Tensor]]) -> None:
        server = make_server()
        await server.begin_weight_sync()
        await server.load_weights(weights)
        await server.end_weight_sync()

    good = weights_of(make_model())
    with pytest.raises(RuntimeError, match=r"did not send \['lm_head.weight'\]"):
        run(lambda: sync([(n, t) for n, t in good if n != "lm_head.weight"]))
    with pytest.raises(RuntimeError, match="extra' of the trainer is not in"):
        run(lambda: sync([*good, ("model.extra", torch.zeros(1))]))
    with pytest.raises(
        RuntimeError, match=r"'lm_head.weight' has shape \(2, 2\) in the trainer and \(40, 32\)"
    ):
        run(lambda: sync([("lm_head.weight", torch.zeros(2, 2))]))
    with pytest.raises(RuntimeError, match="outside of a weight sync"):
        run(lambda: make_server().load_weights(good))


def test_a_sync_waits_for_the_batch_and_a_batch_for_the_sync() -> None:
    server = make_server()
    slow = SlowGenerator(server.weights["lm_head.weight"], 0.3)
    server.generator = slow  # type: ignore[assignment]

    async def scenario() -> None:
        await server.ready()
        first = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="first"))
        await asyncio.sleep(0.15)
        assert slow.batches == 1
        await server.begin_weight_sync(1)
        await asyncio.sleep(0)
        assert first.done() and (await first).extra_fields["global_steps"] is None
        second = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="second"))
        await asyncio.sleep(0.3)
        assert slow.batches == 1 and not second.done()
        await server.load_weights(weights_of(server.model))
        await asyncio.sleep(0.1)
        assert slow.batches == 1
        await server.end_weight_sync()
        assert (await second).extra_fields["global_steps"] == 1 and slow.batches == 2

    run(scenario)


def test_a_sync_never_meets_a_generation() -> None:
    """Generations that take a while, and syncs in two pieces with pauses between, all at once."""
    server = make_server()
    weight = server.weights["lm_head.weight"]
    server.generator = SlowGenerator(weight, 0.02)  # type: ignore[assignment]

    async def ask(index: int) -> list[float]:
        await asyncio.sleep(0.013 * index)
        output = await server.generate([5], dict(LOG_PROBS), request_id=str(index))
        return [output.extra_fields["global_steps"], *output.log_probs]

    async def sync(version: int) -> None:
        await server.begin_weight_sync(version)
        half = torch.full(weight.shape, float(version))
        with torch.no_grad():
            weight.view(-1)[:100] = version  # torn on purpose until the second piece
        await asyncio.sleep(0.03)
        await server.load_weights(
            [(name, tensor) for name, tensor in weights_of(server.model) if name != "lm_head.weight"]
        )
        await server.load_weights([("lm_head.weight", half)])
        await server.end_weight_sync()

    async def scenario() -> list[list[float]]:
        await server.ready()
        await sync(0)
        asks = [asyncio.create_task(ask(index)) for index in range(40)]
        for version in range(1, 8):
            await asyncio.sleep(0.02)
            await sync(version)
        return await asyncio.gather(*asks)

    seen = run(scenario)
    assert all(version == start == end for version, start, end in seen), seen
    assert len({version for version, _, _ in seen}) > 3


# --- control ---


def test_abort_hold_and_resume() -> None:
    server = make_server()
    server.generator = SlowGenerator(server.weights["lm_head.weight"], 5.0)  # type: ignore[assignment]

    async def scenario() -> None:
        await server.ready()
        running = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="running"))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="waiting"))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        assert await server.abort_all_requests() == {
            "aborted_count": 2,
            "request_ids": ["running", "waiting"],
        }
        assert (await running).stop_reason == "aborted" and (await running).token_ids == [7]
        assert (await waiting).stop_reason == "aborted" and (await waiting).token_ids == []
        assert time.monotonic() - start < 1

        server.generator.seconds = 0.01  # type: ignore[attr-defined]
        held = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="held"))
        await asyncio.sleep(0.1)
        assert not held.done()
        await server.abort_all_requests(reject_request=True)
        rejected = await server.generate([5], dict(LOG_PROBS), request_id="rejected")
        assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
        await server.resume_generation()
        assert (await server.generate([5], dict(LOG_PROBS), request_id="after")).stop_reason == "completed"
        await held
        await server.sleep()

    run(scenario)


def test_sleep_waits_for_the_running_batch() -> None:
    server = make_server()
    server.generator = SlowGenerator(server.weights["lm_head.weight"], 0.3)  # type: ignore[assignment]

    async def scenario() -> None:
        await server.ready()
        await server.sleep()  # nothing to wait for
        request = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="a"))
        await asyncio.sleep(0.05)
        await server.sleep()
        await asyncio.sleep(0)
        assert request.done()
        for method in ("wake_up", "clear_kv_cache", "release_kv_cache", "resume_kv_cache", "start_profile"):
            await getattr(server, method)()
        await server.stop_profile()

    run(scenario)


@pytest.mark.usefixtures("short_timeout")
def test_waits_end_with_a_message() -> None:
    async def sync_behind_a_batch() -> None:
        server = make_server()
        server.generator = SlowGenerator(server.weights["lm_head.weight"], 2.0)  # type: ignore[assignment]
        await server.ready()
        request = asyncio.create_task(server.generate([5], dict(LOG_PROBS), request_id="a"))
        await asyncio.sleep(0.1)
        try:
            await server.begin_weight_sync(1)
        finally:
            request.cancel()

    async def request_behind_a_sync() -> None:
        server = make_server()
        await server.ready()
        await server.begin_weight_sync(1)  # and the worker dies
        await server.generate([5], dict(LOG_PROBS), request_id="a")

    async def second_sync() -> None:
        server = make_server()
        await server.begin_weight_sync(1)
        await server.begin_weight_sync(2)

    async def never_resumed() -> None:
        server = make_server()
        await server.ready()
        await server.abort_all_requests()
        await server.generate([5], dict(LOG_PROBS), request_id="a")

    for scenario, message in (
        (
            sync_behind_a_batch,
            r"waited 0.3 s for the running batch of hf_server_0 before a weight sync \(PODS_CPU",
        ),
        (request_behind_a_sync, r"hf_server_0 waited 0.3 s for a weight sync to end \(PODS_CPU_TIMEOUT_S\)"),
        (second_sync, "waited 0.3 s for another weight sync of hf_server_0"),
        (never_resumed, "waited 0.3 s for resume_generation of hf_server_0"),
    ):
        with pytest.raises(RolloutTimeoutError, match=message):
            run(scenario)


@pytest.mark.usefixtures("short_timeout")
def test_a_long_queue_that_moves_is_no_timeout() -> None:
    server = make_server(max_num_seqs=1)
    server.generator = SlowGenerator(server.weights["lm_head.weight"], 0.1)  # type: ignore[assignment]

    async def scenario() -> list:
        await server.ready()
        return await asyncio.gather(
            *[server.generate([5], dict(LOG_PROBS), request_id="a") for _ in range(8)]
        )

    assert len(run(scenario)) == 8


# --- replica and adapter, with Ray ---


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """verl's rollout and model config for a tiny model."""
    from omegaconf import OmegaConf
    from verl.workers.config import RolloutConfig

    from pods_plugin.cpu.models import build_tiny_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(path, hidden_size=32)
    rollout = RolloutConfig(
        name="hf",
        tensor_model_parallel_size=1,
        prompt_length=16,
        response_length=8,
        n_gpus_per_node=1,
        seed=1,
    )
    model = OmegaConf.create(
        {
            "_target_": "verl.workers.config.HFModelConfig",
            "path": str(path),
            "override_config": {"attn_implementation": "sdpa"},
        }
    )
    return rollout, model


def make_adapter(configs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> HFServerAdapter:
    from verl.utils.config import omega_conf_to_dataclass

    monkeypatch.setenv("RANK", "0")
    rollout, model = configs
    return HFServerAdapter(rollout, omega_conf_to_dataclass(model), device_mesh=None)


def test_replica_serves_takes_weights_and_may_die(
    ray_cluster: None, configs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from transformers import AutoModelForCausalLM

    rollout, model_config = configs
    replica = HFReplica(replica_rank=0, config=rollout, model_config=model_config, gpus_per_node=1)
    adapter = make_adapter(configs, monkeypatch)
    # Several buckets.
    monkeypatch.setattr(hf_rollout, "_BUCKET_BYTES", 50_000)
    model = AutoModelForCausalLM.from_pretrained(model_config.path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)

    async def scenario() -> Any:
        with pytest.raises(RuntimeError, match="there is no rollout server hf_server_0"):
            await adapter.update_weights(iter([]))
        await replica.launch_servers()
        assert replica.server_address == "hf_server_0"
        await replica.sleep()
        await adapter.update_weights(model.state_dict().items(), global_steps=4, base_sync_done=True)
        output = await replica.server_handle.generate.remote(
            request_id="a",
            prompt_ids=[5, 6],
            sampling_params=dict(LOG_PROBS),
            image_data=None,
            video_data=None,
        )
        await replica.abort_all_requests()
        await replica.resume_generation()
        ray.kill(replica.server_handle)
        with pytest.raises(RuntimeError, match="weight sync: rollout server hf_server_0 is gone"):
            await adapter.update_weights(model.state_dict().items())
        return output

    output = asyncio.run(scenario())
    assert output.extra_fields["global_steps"] == 4
    expected = full_log_probs(model, [5, 6, *output.token_ids], 2, 1.0)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=0)


def test_a_server_that_does_not_answer_times_out(
    ray_cluster: None, configs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    class Stuck:
        async def begin_weight_sync(self, global_steps: int | None) -> None:
            await asyncio.sleep(60)

    stuck = ray.remote(Stuck).options(name="hf_server_0", num_cpus=0).remote()
    ray.get(stuck.__ray_ready__.remote())
    adapter = make_adapter(configs, monkeypatch)
    monkeypatch.setenv("PODS_CPU_TIMEOUT_S", "0.5")
    with pytest.raises(RolloutTimeoutError, match=r"waited 0.5 s for begin_weight_sync of rollout server"):
        asyncio.run(adapter.update_weights(iter([])))
    ray.kill(stuck)


def test_what_the_rollout_does_not_do(configs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, model_config = configs
    for kind, message in (("is_reward_model", "reward model"), ("is_teacher_model", "distillation teacher")):
        replica = HFReplica(0, rollout, model_config, 1, **{kind: True})
        with pytest.raises(NotImplementedError, match=f"does not serve a {message}"):
            asyncio.run(replica.launch_servers())

    adapter = make_adapter(configs, monkeypatch)
    for weights, arguments, message in (
        ([], {"wire_format": "delta_flush"}, "takes full weights, not 'delta_flush'"),
        ([], {"peft_config": object()}, "lora.merge=True"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            asyncio.run(adapter.update_weights(iter(weights), **arguments))

    async def nothing(method: str, *args: Any) -> None:
        pass

    adapter._call = nothing  # type: ignore[method-assign]
    for name in ("model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.base_layer.weight"):
        with pytest.raises(NotImplementedError, match="so that verl sends the merged weights"):
            asyncio.run(adapter.update_weights(iter([(name, torch.zeros(1))])))


def test_only_the_first_rank_of_a_replica_sends(
    configs: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    rollout, model_config = configs
    adapter = make_adapter((replace(rollout, tensor_model_parallel_size=2), model_config), monkeypatch)
    assert (adapter.replica_rank, adapter.is_leader_rank) == (0, True)
    os.environ["RANK"] = "3"  # undone with the fixture's own setenv
    follower = HFServerAdapter(
        replace(rollout, tensor_model_parallel_size=2), adapter.model_config, device_mesh=None
    )
    assert (follower.replica_rank, follower.is_leader_rank) == (1, False)
    walked = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            walked.append(name)  # a collective in reality: every rank must take part
            yield name, torch.zeros(1)

    asyncio.run(follower.update_weights(weights()))
    assert walked == ["a", "b"]
