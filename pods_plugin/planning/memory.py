"""Memory a GPU, by part, while a step generates and while it updates; and what to write where it does not fit.

Every formula is in docs/planning.md with its source. All results are bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from pods_plugin.planning.gpus import GIB, GPU
from pods_plugin.planning.job import Job

CONTEXT = 1.0 * GIB  # of a process on the GPU: CUDA context, NCCL buffers
ASLEEP = 1.5 * GIB  # what a sleeping vLLM keeps: its context and CUDA graphs
GRAPHS = 1.0 * GIB  # CUDA graphs of vLLM
HEADROOM = 0.05  # of the GPU, for fragmentation


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest GPU.

    Attributes:
        generate: Part -> bytes while vLLM generates.
        update: Part -> bytes at the peak of the backward pass.
        limit: What may be used of the GPU; None: not judged.
        kv_tokens: Tokens that the KV cache of one engine replica holds; infinite for the `hf` rollout.
        problems: Why it does not fit, one line each; empty: it fits.
    """

    generate: dict[str, float]
    update: dict[str, float]
    limit: float | None
    kv_tokens: float
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems


def memory_plan(job: Job, gpu: GPU) -> MemoryPlan:
    """The memory of a run on GPUs of that kind."""
    trainer, engine = job.trainer, job.engine
    states = _megatron_states(job) if trainer.megatron else _fsdp_states(job)
    activations = _megatron_activations(job) if trainer.megatron else _fsdp_activations(job)
    vllm, kv_tokens = _vllm(job, gpu)
    budget = sum(vllm.values())

    update = {**states, **activations, "CUDA context": CONTEXT}
    if engine.on_trainer and engine.name != "hf":
        update["vLLM"] = ASLEEP if engine.frees_cache else budget
    generate = dict(vllm)
    generate["CUDA context"] = CONTEXT
    if engine.on_trainer:
        host = trainer.cpu_policy
        generate["weights"] = 0.0 if trainer.param_offload or host else states["weights"]
        generate["optimizer"] = 0.0 if trainer.optimizer_offload or host else states["optimizer"]
        if (
            trainer.megatron
        ):  # its gradient buffer lives on between steps, and is offloaded with the parameters
            generate["gradients"] = 0.0 if trainer.param_offload else states["gradients"]
            generate["reference"] = states["reference"]
    update, generate = ({k: v for k, v in parts.items() if v > 0} for parts in (update, generate))

    limit = None if gpu.memory is None else gpu.memory * (1 - HEADROOM)
    problems = []
    if limit is not None:
        for phase, parts in (("generating", generate), ("the update", update)):
            if (total := sum(parts.values())) > limit:
                problems.append(f"{phase} needs {total / GIB:.1f} GiB of {limit / GIB:.1f} GiB")
        if kv_tokens < engine.max_tokens:
            problems.append(
                f"the KV cache holds {max(0, int(kv_tokens))} tokens, fewer than one sequence of {engine.max_tokens}"
            )
    return MemoryPlan(generate, update, limit, kv_tokens, tuple(problems))


# --- states of training ----------------------------------------------------------------------------------------------


def _trainable(job: Job) -> int:
    rank = job.trainer.lora_rank
    return job.model.lora_parameters(rank) if rank else job.model.parameters


def _all_parameters(job: Job) -> int:
    rank = job.trainer.lora_rank
    return job.model.parameters + (job.model.lora_parameters(rank) if rank else 0)


def _fsdp_states(job: Job) -> dict[str, float]:
    """Sharded weights, gradients and Adam's two moments in the stored dtype (ZeRO-3), and what is gathered."""
    trainer, model = job.trainer, job.model
    layer, root = model.layer_parameters, model.vocabulary_matrix + model.hidden
    if trainer.shard == 1:
        gathered = float(trainer.element * (layer + root)) * (trainer.element != trainer.weight)
    elif trainer.reshard:
        gathered = float(
            trainer.element * (2 * layer + root)
        )  # the running layer, the prefetched one, the head
    else:
        gathered = float(trainer.element * model.parameters)
    if not trainer.lora_rank:
        gathered += (trainer.element + 4) * layer + trainer.element * root  # gradients until they are reduced
    if trainer.cpu_policy:
        return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered layers": gathered}
    return {
        "weights": trainer.weight * _all_parameters(job) / trainer.shard,
        "gradients": trainer.weight * _trainable(job) / trainer.shard,
        "optimizer": 2 * trainer.weight * _trainable(job) / trainer.shard,
        "gathered layers": gathered,
    }


def _megatron_states(job: Job) -> dict[str, float]:
    """bf16 weights, fp32 gradients, and 12 bytes of optimizer that the distributed optimizer shards."""
    trainer, model = job.trainer, job.model
    layers = model.layers / trainer.pp
    expert = layers * model.expert_matrices / (trainer.ep * trainer.etp)
    dense_layer = model.layer_parameters - model.expert_matrices - model.layer_vectors
    ends = model.vocabulary_matrix * (2 if trainer.pp == 1 and not model.tied else 1)
    dense = layers * (dense_layer / trainer.tp + model.layer_vectors) + ends / trainer.tp
    if trainer.lora_rank:  # the base is frozen: adapters alone have gradients and optimizer
        adapters = model.lora_parameters(trainer.lora_rank) / (trainer.tp * trainer.pp)
        trained, expert_trained = adapters, 0.0
    else:
        adapters, trained, expert_trained = 0.0, dense, expert
    shards = trainer.dp * trainer.cp if trainer.distributed_optimizer else 1
    expert_shards = trainer.expert_dp if trainer.distributed_optimizer else 1
    weights = 2 * (dense + expert + adapters)
    return {
        "weights": weights,
        "gradients": 4 * (trained + expert_trained),
        "optimizer": 12 * (trained / shards + expert_trained / expert_shards),
        "reference": weights
        if trainer.reference and not trainer.reference_offload and not trainer.lora_rank
        else 0.0,
    }


# --- activations -----------------------------------------------------------------------------------------------------


def _fsdp_activations(job: Job) -> dict[str, float]:
    trainer, model = job.trainer, job.model
    wide = trainer.element / 2
    layer = wide * model.layer_activations(fused=False)
    kept = 0.0 if trainer.activation_offload else trainer.element * model.hidden
    tokens = trainer.micro_tokens
    a_token = model.layers * kept + layer if trainer.checkpointing else model.layers * layer
    activations = tokens * a_token
    if trainer.fused_head:  # in chunks of 512 tokens
        tokens = min(tokens, 512)
    logits = tokens * model.vocab * wide * (8 if trainer.entropy else 6)
    return {"activations": activations, "logits": logits}


def _megatron_activations(job: Job) -> dict[str, float]:
    trainer, model = job.trainer, job.model
    tokens, wide = trainer.micro_tokens, trainer.element / 2
    layer = wide * model.layer_activations(fused=True)
    kept = float(trainer.element * model.hidden)
    outside = wide * 8 * model.hidden  # norms and their inputs: split over tp by sequence parallelism only
    if trainer.sequence_parallel:
        layer, kept = layer / trainer.tp, kept / trainer.tp
    else:
        layer = outside + (layer - outside) / trainer.tp
    # 1F1B: the first stage holds as many micro-batches as there are stages; interleaving holds a little more
    in_flight = trainer.pp * (1 + (trainer.pp - 1) / (trainer.pp * trainer.vpp) * (trainer.vpp > 1))
    layers = model.layers / trainer.pp * in_flight
    activations = tokens * (layers * kept + layer if trainer.checkpointing else layers * layer)
    # bf16 logits, their fp32 copy, and its gradient, each split over tp
    return {
        "activations": activations,
        "logits": 0.0 if trainer.fused_head else tokens * model.vocab * 10 / trainer.tp,
    }


# --- vLLM ------------------------------------------------------------------------------------------------------------


def _vllm(job: Job, gpu: GPU) -> tuple[dict[str, float], float]:
    """Parts of vLLM's budget, and the tokens that the KV cache of a replica holds."""
    engine, model = job.engine, job.model
    if gpu.memory is None or engine.name == "hf":
        return {}, math.inf
    split = engine.tp * engine.pp
    experts = model.layers * model.expert_matrices
    expert_split = split * engine.dp if engine.ep > 1 else split
    weights = engine.element * ((model.parameters - experts) / split + experts / expert_split)
    profile = engine.batched_tokens * model.layer_activations(fused=True) / engine.tp
    profile += (
        2 * 4 * engine.sequences * model.vocab
    )  # logits of every sequence and a copy for sampling, fp32
    budget = engine.utilization * gpu.memory
    cache = max(0.0, budget - weights - profile)
    per_token = model.kv_bytes(engine.element) / engine.pp / min(engine.tp, model.kv_heads)
    parts = {
        "vLLM weights": weights,
        "KV cache": cache,
        "vLLM": profile + (0.0 if engine.eager else GRAPHS),
    }
    return parts, cache / per_token * engine.dp


# --- what to write instead -------------------------------------------------------------------------------------------

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_Changed = tuple[str, Job]
_Change = Callable[[Job, GPU], "_Changed | None"]


def advice(job: Job, gpu: GPU) -> list[str]:
    """Overrides that make a run fit that does not; empty if it fits, or if none of the known ones are enough.

    With as many GPUs as there are if that can be, else with two, four or eight times as many.
    """
    for times in (1, 2, 4, 8):
        grown = _with_gpus(job, times)
        for count in range(len(_STRUCTURE) + 1):
            chosen = _fitting(grown, gpu, list(_STRUCTURE[:count]))
            if chosen is None:
                continue
            for change in list(chosen):  # what turned out not to be needed
                without = [other for other in chosen if other is not change]
                if memory_plan(_apply(grown, gpu, without)[1], gpu).fits:
                    chosen = without
            more = [] if times == 1 else [f"--gpus {grown.gpus}"]
            return more + _apply(grown, gpu, chosen)[0]
    return []


def _fitting(job: Job, gpu: GPU, structure: list[_Change]) -> list[_Change] | None:
    """The changes with as few of the tuned ones as it takes to fit; None if it does not."""
    for tuned in ([], [_smaller_micro_batch], [_utilization], [_smaller_micro_batch, _utilization]):
        if memory_plan(_apply(job, gpu, [*structure, *tuned])[1], gpu).fits:
            return [*structure, *tuned]
    return None


def _apply(job: Job, gpu: GPU, changes: list[_Change]) -> tuple[list[str], Job]:
    texts = []
    for change in changes:
        if found := change(job, gpu):
            texts.append(found[0])
            job = found[1]
    return texts, job


def _used(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _smaller_micro_batch(job: Job, gpu: GPU) -> _Changed | None:
    trainer = job.trainer
    sequence = math.ceil(job.longest / trainer.cp)
    if trainer.dynamic:
        sizes = [trainer.micro_tokens // 2**step for step in range(1, 8)]
        sizes = [*(size for size in sizes if size > sequence), sequence]
    else:
        now = trainer.micro_tokens // sequence
        sizes = [now // 2**step * sequence for step in range(1, 8) if now // 2**step]
    sizes = [size for size in sizes if size < trainer.micro_tokens]
    best = None
    for size in sizes:
        best = dataclasses.replace(job, trainer=dataclasses.replace(trainer, micro_tokens=size))
        plan = memory_plan(best, gpu)
        if plan.limit is None or _used(plan.update) <= plan.limit:
            break
    if best is None:
        return None
    size = best.trainer.micro_tokens
    if trainer.dynamic:
        return f"{_ACTOR}.ppo_max_token_len_per_gpu={size}", best
    return f"{_ACTOR}.ppo_micro_batch_size_per_gpu={size // sequence}", best


def _recompute(job: Job, gpu: GPU) -> _Changed | None:
    if job.trainer.checkpointing:
        return None
    changed = dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, checkpointing=True))
    if job.trainer.megatron:
        block = f"++{_ACTOR}.megatron.override_transformer_config"
        keys = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
        return " ".join(f"{block}.{key}" for key in keys), changed
    return f"{_MODEL}.enable_gradient_checkpointing=True", changed


def _utilization(job: Job, gpu: GPU) -> _Changed | None:
    """The largest share for vLLM that leaves room for what training keeps on the GPU, and that is enough."""
    now = job.engine.utilization
    for percent in range(90, 5, -5):
        engine = dataclasses.replace(job.engine, utilization=percent / 100)
        changed = dataclasses.replace(job, engine=engine)
        plan = memory_plan(changed, gpu)
        if plan.limit is None or plan.kv_tokens < engine.max_tokens:
            return None
        if _used(plan.generate) <= plan.limit and (engine.frees_cache or _used(plan.update) <= plan.limit):
            return (
                None
                if engine.utilization == now
                else (f"{_ROLLOUT}.gpu_memory_utilization={percent / 100}", changed)
            )
    return None


def _offload(job: Job, gpu: GPU) -> _Changed | None:
    trainer = job.trainer
    if (trainer.param_offload and trainer.optimizer_offload) or trainer.cpu_policy:
        return None
    block = f"{_ACTOR}.megatron" if trainer.megatron else f"{_ACTOR}.fsdp_config"
    changed = dataclasses.replace(trainer, param_offload=True, optimizer_offload=True)
    return f"{block}.param_offload=True {block}.optimizer_offload=True", dataclasses.replace(
        job, trainer=changed
    )


def _free_cache(job: Job, gpu: GPU) -> _Changed | None:
    if job.engine.frees_cache:
        return None
    changed = dataclasses.replace(job, engine=dataclasses.replace(job.engine, frees_cache=True))
    return f"{_ROLLOUT}.free_cache_engine=True", changed


def _rollout_tp(job: Job, gpu: GPU) -> _Changed | None:
    engine = job.engine
    tp = engine.tp * 2
    if tp > job.gpus_per_node or job.model.heads % tp or engine.gpus % (tp * engine.pp * engine.dp):
        return None
    changed = dataclasses.replace(job, engine=dataclasses.replace(engine, tp=tp))
    return f"{_ROLLOUT}.tensor_model_parallel_size={tp}", changed


def _sequence_or_tensor_parallel(job: Job, gpu: GPU) -> _Changed | None:
    trainer = job.trainer
    size = 2 * (trainer.tp if trainer.megatron else trainer.cp)
    if size > job.gpus_per_node or job.model.heads % size or trainer.gpus % (trainer.model_parallel * 2):
        return None
    if trainer.megatron:
        etp = size if trainer.etp == trainer.tp else trainer.etp
        changed = dataclasses.replace(trainer, tp=size, etp=etp)
        text = f"{_ACTOR}.megatron.tensor_model_parallel_size={size}"
    else:
        changed = dataclasses.replace(trainer, cp=size)
        text = f"{_ACTOR}.ulysses_sequence_parallel_size={size}"
        if trainer.dynamic:  # verl counts tokens a GPU: halved here, the sequence-parallel pair holds as many
            micro = max(trainer.micro_tokens // 2, math.ceil(job.longest / size))
            text += f" {_ACTOR}.ppo_max_token_len_per_gpu={micro}"
        else:
            micro = trainer.micro_tokens // 2
        changed = dataclasses.replace(changed, micro_tokens=micro)
    return text, dataclasses.replace(job, trainer=changed)


def _cpu_policy(job: Job, gpu: GPU) -> _Changed | None:
    if job.trainer.backend != "fsdp2" or job.trainer.cpu_policy:
        return None
    changed = dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, cpu_policy=True))
    return f"{_ACTOR}.fsdp_config.offload_policy=True", changed


def _with_gpus(job: Job, times: int) -> Job:
    trainer, engine = job.trainer, job.engine
    shard = trainer.shard * times if trainer.shard == trainer.gpus else trainer.shard
    return dataclasses.replace(
        job,
        trainer=dataclasses.replace(trainer, gpus=trainer.gpus * times, shard=shard),
        engine=dataclasses.replace(engine, gpus=engine.gpus * times),
    )


# From what costs least time to what costs most; the tuned ones, which choose a value that fits, come last.
_STRUCTURE: tuple[_Change, ...] = (
    _free_cache,
    _recompute,
    _offload,
    _rollout_tp,
    _sequence_or_tensor_parallel,
    _cpu_policy,
)
