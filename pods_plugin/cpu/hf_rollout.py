"""The `hf` rollout: verl's rollout interface served by a transformers model in a Ray actor, for machines
without vLLM.

HFServer         the actor: batches requests, generates, takes new weights
HFReplica        what verl's LLMServerManager starts and steers (verl.workers.rollout.replica)
HFServerAdapter  what a training worker calls to hand over its weights (verl.workers.rollout.base)
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil
import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from pods_plugin.cpu.attention import use_grouped_attention
from pods_plugin.cpu.generation import BatchedGenerator, GenerationRequest, GenerationResult
from pods_plugin.cpu.settings import cpu_threads, timeout_s

# Requests of one step arrive one by one, about a millisecond apart: wait for a gap of this length before a
# batch starts, but no longer than the second number in all.
_QUIET_S = 0.01
_GATHER_S = 0.1

# Weights travel in pieces of at most this many bytes, so that neither side ever holds a second copy of the
# model.
_BUCKET_BYTES = 64 << 20

# Sampling parameters that verl sends and that mean nothing here.
_IGNORED_PARAMETERS = {"logprobs", "n"}
# Parameters that are accepted only at the value that switches them off: they would change the distribution
# that is sampled from, and the actor's log-probs know nothing of them.
_NEUTRAL_PARAMETERS = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
}

_T = TypeVar("_T")


class RolloutTimeoutError(RuntimeError):
    """A wait took longer than PODS_CPU_TIMEOUT_S; the message says who was waited for."""


async def _within(wait: Awaitable[_T], who: str, seconds: float | None = None) -> _T:
    """Await something, but not for ever.

    Raises:
        RolloutTimeoutError: It took longer than `seconds`, default PODS_CPU_TIMEOUT_S.
    """
    seconds = timeout_s() if seconds is None else seconds
    try:
        return await asyncio.wait_for(wait, seconds)
    except asyncio.TimeoutError:
        raise RolloutTimeoutError(
            f"hf rollout: waited {seconds:g} s for {who} (PODS_CPU_TIMEOUT_S)."
        ) from None


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The name of a replica's actor. Ray's namespace is private to a run, so two runs may use the same."""
    return f"hf_server_{replica_rank}{suffix}"


@dataclass(eq=False)
class _Pending:
    """A request that waits for its result."""

    request_id: str
    request: GenerationRequest
    future: asyncio.Future[tuple[GenerationResult, int | None]]


@dataclass
class _WeightSync:
    """A weight sync under way."""

    global_steps: int | None
    loaded: set[int] = field(default_factory=set)  # storage addresses: tied weights count once


class HFServer:
    """One model that serves generation requests in batches; a Ray actor once wrapped by HFReplica.

    A batch and a weight sync exclude each other: a sync waits for the running batch, and no batch starts
    before the sync has ended. Requests that arrive meanwhile wait.

    Args:
        config: verl's RolloutConfig.
        model_config: The `actor_rollout_ref.model` config.
        replica_rank: Which replica this is; part of every seed.
        replicas: How many replicas share this machine's memory.
    """

    def __init__(self, config: Any, model_config: Any, replica_rank: int, replicas: int = 1) -> None:
        torch.set_num_threads(cpu_threads())
        model, tokenizer = _load_model(model_config)
        self._setup(config, model, tokenizer, replica_rank, replicas)

    def _setup(self, config: Any, model: Any, tokenizer: Any, replica_rank: int, replicas: int = 1) -> None:
        self.name = server_name(replica_rank)
        self.config = config
        self.model = model
        self.replica_rank = replica_rank
        self.generator = BatchedGenerator(model, *_special_tokens(model, tokenizer))
        # Tied weights appear under each of their names here, as in the state dict that the trainer sends.
        self.weights = model.state_dict(keep_vars=True)
        self.max_model_len = int(config.max_model_len or _context_length(model.config))
        self.max_cache_tokens = _cache_tokens(
            model, psutil.virtual_memory().available // (4 * max(1, replicas))
        )
        self.global_steps: int | None = None
        self._seen: Counter[bytes] = Counter()  # requests of each prompt at this weight version
        self._queue: deque[_Pending] = deque()
        self._in_batch: list[_Pending] = []
        self._arrived = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._abort = threading.Event()
        self._model_lock = asyncio.Lock()  # held by the running batch, or by a weight sync from begin to end
        self._sync: _WeightSync | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._progress = time.monotonic()
        self._loop_task: asyncio.Task[None] | None = None

    async def ready(self) -> str:
        """Start serving. Returns the server's name."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._serve())
        return self.name

    # ---- generation ----------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate one sequence.

        Args:
            prompt_ids: Token ids.
            sampling_params: temperature, top_k, top_p, max_tokens (or max_new_tokens), stop_token_ids,
                ignore_eos, seed, logprobs (true: return them), as verl's agent loops send them.
            request_id: For messages.
            image_data: Not supported.
            video_data: Not supported.
            audio_data: Not supported.
            mm_processor_kwargs: Not used.
            priority: Not used; requests are served in order of arrival.

        Raises:
            ValueError: A parameter that is unknown or out of range, a prompt without room to answer, or
                image, video or audio data.
            RolloutTimeoutError: Nothing moved in this server for PODS_CPU_TIMEOUT_S.
        """
        if image_data or video_data or audio_data:
            raise ValueError(
                "the hf rollout serves text only; use rollout.name=vllm for images, video and audio."
            )
        while not self._open.is_set():
            if self._rejecting:
                return self._output(GenerationResult(token_ids=[], log_probs=[], stop_reason="aborted"), True)
            await _within(self._open.wait(), f"resume_generation of {self.name}")
        # No await from here to the queue: between the gate and the queue no abort can slip in.
        pending = _Pending(
            request_id, self._request(prompt_ids, sampling_params), asyncio.get_running_loop().create_future()
        )
        self._queue.append(pending)
        self._idle.clear()
        self._arrived.set()
        result, global_steps = await self._result(pending)
        return self._output(result, bool(sampling_params.get("logprobs", False)), global_steps)

    def _request(self, prompt_ids: Sequence[int], sampling_params: dict[str, Any]) -> GenerationRequest:
        """Check verl's sampling parameters and give the request its seed."""
        prompt = [int(token) for token in prompt_ids]
        parameters = {key: value for key, value in sampling_params.items() if key not in _IGNORED_PARAMETERS}
        for key, neutral in _NEUTRAL_PARAMETERS.items():
            if parameters.pop(key, neutral) not in (neutral, None):
                raise ValueError(
                    f"the hf rollout does not support {key}={sampling_params[key]}; leave it at {neutral}."
                )
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room to answer within "
                f"rollout.max_model_len={self.max_model_len}."
            )
        # The default is verl's: a multi-turn sequence stays within prompt_length + response_length.
        default = min(
            self.config.response_length, self.config.prompt_length + self.config.response_length - len(prompt)
        )
        max_tokens = parameters.pop("max_tokens", None)
        max_new_tokens = parameters.pop("max_new_tokens", None)
        max_tokens = max_new_tokens if max_tokens is None else max_tokens
        seed = parameters.pop("seed", None)
        ignore_eos = parameters.pop("ignore_eos", None)
        request = GenerationRequest(
            prompt_ids=prompt,
            max_tokens=max(1, min(default if max_tokens is None else int(max_tokens), room)),
            seed=self._next_seed(prompt) if seed is None else _mixed(int(seed), prompt),
            temperature=float(parameters.pop("temperature", 1.0)),
            top_k=int(parameters.pop("top_k", -1)),
            top_p=float(parameters.pop("top_p", 1.0)),
            stop_token_ids=tuple(parameters.pop("stop_token_ids", None) or ()),
            ignore_eos=bool(self.config.ignore_eos if ignore_eos is None else ignore_eos),
        )
        if parameters:
            raise ValueError(
                f"the hf rollout does not know the sampling parameters {sorted(parameters)}; remove them."
            )
        return request

    def _next_seed(self, prompt: list[int]) -> int:
        """A seed of its own for each request, the same in every run with the same rollout.seed.

        It depends on rollout.seed, the replica, the weight version, the prompt, and how often this version
        has seen the prompt. (Which replica gets a prompt is the load balancer's choice: with several, runs
        repeat only as far as that does.)
        """
        digest = _digest(prompt)
        occurrence = self._seen[digest]
        self._seen[digest] += 1
        steps = -1 if self.global_steps is None else self.global_steps
        head = struct.pack("<qqqq", int(self.config.seed), self.replica_rank, steps, occurrence)
        return int.from_bytes(hashlib.blake2b(head + digest, digest_size=16).digest(), "little")

    async def _result(self, pending: _Pending) -> tuple[GenerationResult, int | None]:
        """Wait for a result for as long as the server moves: a long queue is not a time-out."""
        limit = timeout_s()
        while True:
            await asyncio.wait({pending.future}, timeout=limit)
            if pending.future.done():
                return pending.future.result()
            if time.monotonic() - self._progress > limit:
                blocker = "a weight sync to end" if self._sync is not None else "the running batch"
                raise RolloutTimeoutError(
                    f"hf rollout: {self.name} waited {limit:g} s for {blocker} (PODS_CPU_TIMEOUT_S)."
                )

    def _output(
        self, result: GenerationResult, log_probs: bool, global_steps: int | None = None
    ) -> TokenOutput:
        """The result in verl's form; its servers call `completed` what ended by itself or at its length."""
        return TokenOutput(
            token_ids=result.token_ids,
            log_probs=result.log_probs if log_probs else None,
            stop_reason="aborted" if result.stop_reason == "aborted" else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": self.global_steps if global_steps is None else global_steps,
                "finish_reason": result.stop_reason,
            },
        )

    async def _serve(self) -> None:
        """Gather requests, run a batch, for ever."""
        while True:
            await self._arrived.wait()
            await self._gather()
            async with self._model_lock:
                # Taken from the queue only now: what was aborted while a sync held the lock is gone.
                self._in_batch = self._take_batch()
                if self._in_batch:
                    await self._run_batch(self._in_batch)
                    self._in_batch = []
            if not self._queue:
                self._arrived.clear()
                self._idle.set()

    async def _gather(self) -> None:
        """Wait until no request has come for a moment, so that a step's requests share their batches."""
        start, count = time.monotonic(), -1
        while count != len(self._queue) and time.monotonic() - start < _GATHER_S:
            count = len(self._queue)
            if count >= self.config.max_num_seqs:
                return
            await asyncio.sleep(_QUIET_S)

    def _take_batch(self) -> list[_Pending]:
        """The next requests in order of arrival, up to max_num_seqs and what the KV cache may hold."""
        batch: list[_Pending] = []
        prompt = answer = 0
        while self._queue and len(batch) < self.config.max_num_seqs:
            request = self._queue[0].request
            prompt, answer = max(prompt, len(request.prompt_ids)), max(answer, request.max_tokens)
            if batch and (len(batch) + 1) * (prompt + answer) > self.max_cache_tokens:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _run_batch(self, batch: list[_Pending]) -> None:
        self._progress = time.monotonic()
        try:
            results = await asyncio.to_thread(
                self.generator.generate,
                [pending.request for pending in batch],
                abort=self._abort,
                on_token=self._moved,
            )
        except Exception as error:
            for pending in batch:
                if not pending.future.done():
                    pending.future.set_exception(error)
        else:
            for pending, result in zip(batch, results, strict=True):
                if not pending.future.done():  # done: its caller is gone
                    pending.future.set_result((result, self.global_steps))
        self._progress = time.monotonic()

    def _moved(self) -> None:
        self._progress = time.monotonic()

    async def heartbeat(self) -> float:
        """How far the server is, as a number that grows with every token and weight: for the watchdog."""
        return self._progress

    # ---- weights -------------------------------------------------------------------------------------------

    async def begin_weight_sync(self, global_steps: int | None = None) -> None:
        """Wait for the running batch, then keep further ones from starting until end_weight_sync.

        Raises:
            RolloutTimeoutError: The batch, or another sync, took longer than PODS_CPU_TIMEOUT_S.
        """
        other = "another weight sync" if self._sync is not None else "the running batch"
        await _within(self._model_lock.acquire(), f"{other} of {self.name} before a weight sync")
        self._sync = _WeightSync(global_steps)
        self._progress = time.monotonic()

    async def load_weights(self, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy a part of the weights into the model.

        Raises:
            RuntimeError: No sync was begun, or a name or shape that the model does not have.
        """
        if self._sync is None:
            raise RuntimeError(f"{self.name}: load_weights outside of a weight sync.")
        for name, tensor in named_tensors:
            target = self.weights.get(name)
            if target is None:
                raise RuntimeError(
                    f"weight sync: {name!r} of the trainer is not in the {type(self.model).__name__} here."
                )
            if target.shape != tensor.shape:
                raise RuntimeError(
                    f"weight sync: {name!r} has shape {tuple(tensor.shape)} in the trainer and "
                    f"{tuple(target.shape)} in the rollout."
                )
            with torch.no_grad():
                target.copy_(tensor)
            self._sync.loaded.add(target.data_ptr())
        self._progress = time.monotonic()

    async def end_weight_sync(self) -> None:
        """Check that every weight has come, and let batches start again.

        Raises:
            RuntimeError: Weights are missing; their names. The server then generates no more.
        """
        if self._sync is None:
            raise RuntimeError(f"{self.name}: end_weight_sync without begin_weight_sync.")
        missing = sorted(
            name for name, weight in self.weights.items() if weight.data_ptr() not in self._sync.loaded
        )
        if missing:
            raise RuntimeError(f"weight sync: the trainer did not send {missing}.")
        if self._sync.global_steps is not None:
            await self.set_global_steps(self._sync.global_steps)
        self._seen.clear()
        self._sync = None
        self._progress = time.monotonic()
        self._model_lock.release()

    # ---- control, as verl's RolloutReplica calls it --------------------------------------------------------

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the weight version that outputs report."""
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request with what it has, and hold later ones until resume_generation.

        Args:
            reject_request: Answer later ones at once with an empty, aborted output instead of holding them.

        Returns:
            `aborted_count` and `request_ids`.
        """
        self._open.clear()
        self._rejecting = reject_request
        waiting, self._queue = list(self._queue), deque()
        for pending in waiting:
            if not pending.future.done():
                empty = GenerationResult(token_ids=[], log_probs=[], stop_reason="aborted")
                pending.future.set_result((empty, self.global_steps))
        running = list(self._in_batch)
        self._abort.set()
        try:
            # The batch looks at the event before each token.
            await _within(self._ended(), f"the running batch of {self.name} to abort")
        finally:
            self._abort.clear()
        ids = [pending.request_id for pending in (*running, *waiting)]
        return {"aborted_count": len(ids), "request_ids": ids}

    async def _ended(self) -> None:
        while self._in_batch:
            await asyncio.sleep(0.005)

    async def resume_generation(self) -> None:
        """Take requests again after abort_all_requests."""
        self._rejecting = False
        self._open.set()

    async def sleep(self) -> None:
        """Wait until nothing is generated; there is no device memory to free."""
        await _within(self._idle.wait(), f"the requests of {self.name} to drain")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to restore."""

    async def clear_kv_cache(self) -> None:
        """A KV cache lives as long as its batch."""

    async def release_kv_cache(self) -> None:
        """A KV cache lives as long as its batch."""

    async def resume_kv_cache(self) -> None:
        """A KV cache lives as long as its batch."""

    async def start_profile(self, **kwargs: Any) -> None:
        """No profiler."""

    async def stop_profile(self) -> None:
        """No profiler."""


class HFReplica(RolloutReplica):
    """One rollout replica: one HFServer, whatever the parallel sizes in the config."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is loaded.

        Raises:
            NotImplementedError: A reward-model or teacher replica.
            RolloutTimeoutError: The model was not loaded within PODS_CPU_TIMEOUT_S.
        """
        if self.is_reward_model or self.is_teacher_model:
            kind = "reward model" if self.is_reward_model else "distillation teacher"
            raise NotImplementedError(
                f"the hf rollout does not serve a {kind}; use a reward function, or a machine with vLLM."
            )
        name = server_name(self.replica_rank, self.name_suffix)
        # A GPU count of one machine: every replica of a run loads its own copy of the model there.
        replicas = max(1, self.gpus_per_node // self.world_size)
        server = (
            ray.remote(HFServer)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                config=self.config,
                model_config=self.model_config,
                replica_rank=self.replica_rank,
                replicas=replicas,
            )
        )
        await _within(server.ready.remote(), f"rollout server {name} to load its model")
        self.servers = [server]
        self._server_handle = server
        self._server_address = name


class HFServerAdapter(BaseRollout):
    """A training worker's side of the weight sync.

    Every rank walks through the weights, since gathering one is a collective; the first rank of each replica
    sends.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        ranks_per_replica = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // ranks_per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks_per_replica == 0
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing to restore: there is no device memory."""

    async def release(self) -> None:
        """Nothing to free: there is no device memory."""

    @torch.no_grad()
    async def update_weights(  # type: ignore[override]
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Hand the weights to this replica's server.

        Args:
            weights: Names and full tensors.
            global_steps: The step these weights are of.
            wire_format: `named_tensors`.
            peft_config: Not None: LoRA weights that are not merged.
            **kwargs: Meant for other engines.

        Raises:
            NotImplementedError: Another wire format, or LoRA that is not merged.
            RuntimeError: The server is gone, or it refuses a weight.
            RolloutTimeoutError: The server did not answer within PODS_CPU_TIMEOUT_S.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"the hf rollout takes full weights, not {wire_format!r}: set checkpoint_engine.backend=naive"
            )
        if peft_config is not None:
            raise NotImplementedError(_LORA_MESSAGE)
        await self._call("begin_weight_sync", global_steps)
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if "lora_" in name or ".base_layer." in name:
                raise NotImplementedError(_LORA_MESSAGE)
            if not self.is_leader_rank:
                continue
            # A copy: FSDP1 reuses the storage of the parameter that it has just shown us.
            copy = tensor.detach().to("cpu", torch.float32, copy=True)
            bucket.append((name, copy))
            size += copy.nbytes
            if size >= _BUCKET_BYTES:
                await self._call("load_weights", bucket)
                bucket, size = [], 0
        await self._call("load_weights", bucket)
        await self._call("end_weight_sync")

    async def _call(self, method: str, *args: Any) -> None:
        """Call a method of the server, from the leader only."""
        if not self.is_leader_rank:
            return
        name = server_name(self.replica_rank)
        try:
            if self._server is None:
                self._server = ray.get_actor(name)
        except ValueError:
            raise RuntimeError(f"weight sync: there is no rollout server {name}.") from None
        try:
            await _within(getattr(self._server, method).remote(*args), f"{method} of rollout server {name}")
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"weight sync: rollout server {name} is gone: {_first_line(error)}") from error


_LORA_MESSAGE = (
    "the hf rollout has no LoRA adapters; set actor_rollout_ref.model.lora.merge=True, so that verl sends "
    "the merged weights."
)


def _digest(prompt: list[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(prompt)}q", *prompt), digest_size=16).digest()


def _mixed(seed: int, prompt: list[int]) -> int:
    """The seed of a request that brings one: the turns of a session share it, and must not share the draws."""
    head = seed.to_bytes(16, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(head + _digest(prompt), digest_size=16).digest(), "little")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _load_model(model_config: Any) -> tuple[Any, Any]:
    """Load model (fp32, eval) and tokenizer as the training workers do, override_config included."""
    from transformers import AutoModelForCausalLM
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
    model = AutoModelForCausalLM.from_pretrained(
        config.local_path,
        config=config.hf_config,
        dtype=torch.float32,
        trust_remote_code=config.trust_remote_code,
    )
    use_grouped_attention(model)
    return model.eval().requires_grad_(False), config.tokenizer


def _special_tokens(model: Any, tokenizer: Any) -> tuple[list[int], int]:
    """The tokens that end a sequence, and one to pad with.

    Both sources of eos count, as in vLLM: generation_config.json (a token or a list) and the tokenizer.
    """
    eos = model.generation_config.eos_token_id
    ids = set(eos) if isinstance(eos, (list, tuple)) else {eos}
    ids |= {getattr(tokenizer, "eos_token_id", None)}
    ends = sorted(int(token) for token in ids if token is not None)
    pad = getattr(tokenizer, "pad_token_id", None)
    return ends, int(pad if pad is not None else (ends[0] if ends else 0))


def _context_length(hf_config: Any) -> int:
    return int(getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", 1 << 30))


def _cache_tokens(model: Any, budget_bytes: int) -> int:
    """How many tokens of KV cache fit into a number of bytes."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * config.num_hidden_layers * heads * head_dim * 4
    # Growing a cache by a token copies it: two are alive for a moment, of one layer.
    return max(1, budget_bytes // bytes_per_token)
