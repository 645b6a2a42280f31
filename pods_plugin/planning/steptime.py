"""Seconds a step by phase: a roofline of FLOPs, memory traffic and communication, over an efficiency a phase.

seconds = fixed + roofline / efficiency, where the roofline takes the hardware at its peak. The efficiencies are the
only numbers that are not derived: `DEFAULT` states them, `pods plan --calibrate` fits them to a real run. Formulas and
sources: docs/planning.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pods_plugin.planning.gpus import GPU, NETWORK
from pods_plugin.planning.job import Job
from pods_plugin.planning.memory import memory_plan

EXPOSED = 0.5  # of FSDP's gathering and reducing, what is not hidden behind computation
TRAFFIC = 3.0  # of memory, as a multiple of writing and reading once what a layer keeps for its backward pass
STEP_S = 2e-3  # of a decoding step: scheduling
LAYER_S, EAGER_LAYER_S = (
    5e-5,
    9e-4,
)  # of a decoding step: launching a layer's kernels, in CUDA graphs or one by one
LORA_LAUNCH = 1.8  # adapters add kernels to every linear layer
ROLLOUT_S = 0.009  # of one core a rollout: agent loop, Ray and TransferQueue
PHASES = ("generate", "log-prob", "reference", "update", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What a cluster reaches of its roofline, and seconds that a phase takes whatever its work."""

    generate: float = 0.8
    log_prob: float = 0.75
    update: float = 0.75
    fixed_generate: float = 3.0
    fixed_log_prob: float = 0.5
    fixed_update: float = 1.0
    other: float = 2.0  # weight sync, selection, bookkeeping


DEFAULT = Efficiencies()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens: mean prompt, mean and longest response."""

    prompt: float
    response: float
    longest: float

    @property
    def shape(self) -> float:
        """a of the assumed survival function P(length > k) = (1 - k / longest)^a, which has the right mean."""
        return max(0.0, self.longest / self.response - 1)

    @property
    def squared_response(self) -> float:
        """Mean square of the response's length under that survival function."""
        return 2 * self.longest**2 / ((self.shape + 1) * (self.shape + 2))

    @property
    def squared(self) -> float:
        """Mean square of prompt plus response."""
        return self.prompt**2 + 2 * self.prompt * self.response + self.squared_response


def assumed_lengths(job: Job, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Lengths for a plan without a run: a quarter of the longest prompt, half of the longest response."""
    response = min(response or job.max_response / 2, job.max_response)
    prompt = min(prompt or job.max_prompt / 4, job.max_prompt)
    return Lengths(prompt=prompt, response=response, longest=float(job.max_response))


def step_seconds(
    job: Job, gpu: GPU, lengths: Lengths, efficiencies: Efficiencies = DEFAULT
) -> dict[str, float]:
    """Seconds of a step by phase, and `step`: their sum, or what is not hidden where generation has its own GPUs."""
    e, trainer = efficiencies, job.trainer
    forward = log_prob_roofline(job, gpu, lengths)
    seconds = {
        "generate": e.fixed_generate + generate_roofline(job, gpu, lengths) / e.generate,
        "log-prob": e.fixed_log_prob + forward / e.log_prob if trainer.old_log_prob else 0.0,
        "reference": e.fixed_log_prob + forward / e.log_prob if trainer.reference else 0.0,
        "update": e.fixed_update + update_roofline(job, gpu, lengths) / e.update,
        "other": e.other,
    }
    training = sum(value for phase, value in seconds.items() if phase != "generate")
    seconds["step"] = (
        max(training, seconds["generate"]) if job.engine.separate else training + seconds["generate"]
    )
    return seconds


# --- generation ------------------------------------------------------------------------------------------------------


def generate_roofline(job: Job, gpu: GPU, lengths: Lengths) -> float:
    """Seconds that all rollouts of a step take an ideal engine, or that the processes around it take if that is more.

    While more sequences wait than run, the engine is full; then it drains as the survival function says.
    """
    engine = job.engine
    sequences = job.prompts * job.n / engine.replicas
    room = memory_plan(job, gpu).kv_tokens / (lengths.prompt + lengths.response)
    at_once = max(1.0, min(engine.sequences * engine.dp, room, sequences))

    steps = (np.arange(256) + 0.5) / 256 * lengths.longest
    running = at_once * (1 - steps / lengths.longest) ** lengths.shape
    drain = lengths.longest * float(np.mean(_decode_step(job, gpu, running, lengths.prompt + steps)))
    # a position seen at random lies at longest / (a + 2): the mean over tokens, not over sequences
    middle = lengths.prompt + lengths.longest / (lengths.shape + 2)
    full_steps = (sequences - at_once) * lengths.response / at_once
    full = full_steps * float(_decode_step(job, gpu, np.array([at_once]), np.array([middle]))[0])

    once = job.prompts * min(job.n, engine.replicas) / engine.replicas if engine.prefix_caching else sequences
    flops = job.model.forward_flops(once * lengths.prompt, once * lengths.prompt**2)
    prefill = flops / (engine.gpus_per_replica * gpu.flops)
    around = job.prompts * job.n * ROLLOUT_S / job.workers
    return max(drain + full + prefill, around)


def _decode_step(job: Job, gpu: GPU, running: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Seconds of one decoding step with so many sequences of such a length: memory or FLOPs, and launching."""
    engine, model = job.engine, job.model
    split = engine.tp * engine.pp
    experts = model.layers * model.expert_matrices
    chosen = 1 - (1 - model.active_experts / model.experts) ** running if model.experts else 0.0
    embedding = 0 if model.tied else model.vocabulary_matrix  # a look-up, not read as a whole
    read = engine.element * (model.parameters - experts - embedding + experts * chosen) / split
    cache = running * context * model.kv_bytes(engine.element) / engine.pp / min(engine.tp, model.kv_heads)
    flops = running * (2 * model.matmul_parameters + 4 * model.query * model.layers * context) / split
    launch = (
        model.layers
        * (EAGER_LAYER_S if engine.eager else LAYER_S)
        * (LORA_LAUNCH if job.trainer.lora_rank else 1)
    )
    busy = np.maximum((read + cache / engine.dp) / gpu.bandwidth, flops / engine.dp / gpu.flops)
    return np.maximum(busy, launch) + STEP_S  # launching runs ahead of a busy GPU


# --- training --------------------------------------------------------------------------------------------------------


def log_prob_roofline(job: Job, gpu: GPU, lengths: Lengths) -> float:
    """Seconds of one forward pass over the kept rollouts, log-probs taken."""
    return _passes(job, gpu, lengths, forward=1, backward=0.0, limit=job.trainer.log_prob_tokens) + _moved(
        job, gpu, 0
    )


def update_roofline(job: Job, gpu: GPU, lengths: Lengths) -> float:
    """Seconds of forward, backward and optimizer over the kept rollouts, `ppo_epochs` times."""
    trainer, model = job.trainer, job.model
    forward = 2 if trainer.checkpointing else 1
    backward = 1.0 if trainer.lora_rank else 2.0  # a frozen weight has no gradient of its own
    work = job.epochs * _passes(
        job, gpu, lengths, forward=forward, backward=backward, limit=trainer.micro_tokens
    )
    trained = model.lora_parameters(trainer.lora_rank) if trainer.lora_rank else model.parameters
    if trainer.megatron:
        local = trained / (
            trainer.tp * trainer.pp
        )  # experts are taken as sharded like the rest: an upper bound
        own = local / (trainer.dp * trainer.cp if trainer.distributed_optimizer else 1)
        # gradients are reduced in fp32, updated bf16 weights gathered
        reduced = local * (4 + 2) * (1 - 1 / max(1, trainer.dp * trainer.cp)) / _link(job, gpu, trainer.gpus)
    else:
        own, reduced = trained / trainer.shard, 0.0
    # Adam reads weight, gradient and two moments, and writes three of them
    optimizer = own * 7 * 4 / (gpu.host if trainer.cpu_policy else gpu.bandwidth)
    return work + job.updates * (optimizer + reduced) + _moved(job, gpu, own)


def _passes(job: Job, gpu: GPU, lengths: Lengths, *, forward: int, backward: float, limit: int) -> float:
    """Seconds of passes over all kept rollouts; `backward` counts in FLOPs of a forward pass."""
    trainer, model = job.trainer, job.model
    sequences = job.prompts * job.m
    tokens = sequences * (lengths.prompt + lengths.response)
    flops = (forward + backward) * model.forward_flops(tokens, sequences * lengths.squared)
    # a forward pass writes and reads what a layer keeps, a backward pass does that twice; TRAFFIC for what is not fused
    kept = model.layers * model.layer_activations(fused=trainer.megatron) * trainer.element / 2
    logits = 8 * model.vocab
    moved = tokens * TRAFFIC * (kept * (2 * forward + 4 * (backward > 0)) + logits * (1 + (backward > 0)))
    compute = (flops / gpu.flops + moved / gpu.bandwidth) / trainer.gpus

    local = tokens / trainer.dp / trainer.cp  # tokens of a GPU
    filled = limit if trainer.dynamic else limit * (lengths.prompt + lengths.response) / job.longest
    micro_batches = max(1.0, local / filled)
    runs = forward + (backward > 0)
    if trainer.megatron:
        # two all-reduces of the hidden states a layer and pass
        a_layer = 2 * 2 * trainer.element * model.hidden * (1 - 1 / trainer.tp)
        a_layer += (
            2 * model.active_experts * trainer.element * model.hidden * (1 - 1 / trainer.ep)
            if model.experts
            else 0
        )
        span = trainer.tp * (trainer.ep if model.experts else 1)
        talk = local * model.layers / trainer.pp * a_layer * runs / _link(job, gpu, span)
        bubble = 1 + (trainer.pp - 1) / (trainer.vpp * micro_batches)
        return (compute + talk) * bubble
    share = 1 - 1 / trainer.shard
    gathered = trainer.element * model.parameters * share * (runs if trainer.reshard else 1)
    trained = model.lora_parameters(trainer.lora_rank) if trainer.lora_rank else model.parameters
    reduced = 4 * trained * share if backward else 0.0
    link = gpu.host if trainer.cpu_policy else _link(job, gpu, trainer.shard)
    ulysses = 4 * local * trainer.element * (2 * model.query + 2 * model.key) * (1 - 1 / trainer.cp)
    ulysses *= model.layers / trainer.cp * runs / _link(job, gpu, trainer.cp)
    return compute + ulysses + EXPOSED * micro_batches * (gathered + reduced) / link


def _moved(job: Job, gpu: GPU, own: float) -> float:
    """Seconds to load offloaded parameters to the GPU and store them again; `own`: trained parameters of a GPU."""
    trainer, model = job.trainer, job.model
    split = trainer.tp * trainer.pp if trainer.megatron else trainer.shard
    moved = 2 * trainer.weight * model.parameters / split * trainer.param_offload
    moved += 2 * (12 if trainer.megatron else 8) * own * trainer.optimizer_offload
    return moved / gpu.host


def _link(job: Job, gpu: GPU, span: int) -> float:
    """Bytes a second between GPUs of a group of that size."""
    return gpu.link if span <= job.gpus_per_node else min(gpu.link, NETWORK)
