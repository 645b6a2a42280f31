"""What a composed config asks of the hardware: a verl config read into the few numbers that the formulas need."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.model import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """How the actor is trained. Sizes of parallel groups are 1 where they are not used."""

    backend: str  # fsdp, fsdp2 or megatron
    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1  # context parallel, or Ulysses sequence parallel
    ep: int = 1
    etp: int = 1
    shard: int = 1  # GPUs that a parameter is sharded over by FSDP
    reshard: bool = True
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    element: int = 2  # bytes of an activation
    weight: int = 4  # bytes of a stored parameter
    checkpointing: bool = True  # all layers are recomputed in the backward pass
    activation_offload: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    cpu_policy: bool = False  # FSDP2's offload_policy: parameters, gradients and optimizer live on the host
    lora_rank: int = 0
    fused_head: bool = False
    entropy: bool = False
    micro_tokens: int = 16384  # tokens a GPU and micro-batch, at most
    log_prob_tokens: int = 16384
    dynamic: bool = True
    reference: bool = False
    reference_offload: bool = True
    old_log_prob: bool = True

    @property
    def megatron(self) -> bool:
        """Whether the engine is Megatron."""
        return self.backend == "megatron"

    @property
    def model_parallel(self) -> int:
        """GPUs that share a micro-batch."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        """Micro-batches that run at the same time."""
        return self.gpus // self.model_parallel

    @property
    def expert_dp(self) -> int:
        """Copies of an expert."""
        return max(1, self.gpus // (self.etp * self.ep * self.pp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """How rollouts are generated."""

    name: str
    gpus: int
    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1
    utilization: float = 0.5
    sequences: int = 256  # at a time, per data-parallel rank
    batched_tokens: int = 8192
    max_tokens: int = 1024  # of a prompt with its response
    eager: bool = False
    frees_cache: bool = True
    prefix_caching: bool = True
    element: int = 2
    separate: bool = False  # on GPUs of its own, at the same time as training
    # On the training GPUs as well, asleep while these train: verl's hybrid engine, which separate_async keeps for the
    # warm-up and for validation.
    on_trainer: bool = True

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Engines."""
        return self.gpus // self.gpus_per_replica


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as the planner sees it.

    Attributes:
        n: Rollouts generated a prompt.
        m: Rollouts trained on a prompt; n where nothing is dropped.
    """

    name: str
    model: ModelShape
    trainer: Trainer
    engine: Engine
    gpus_per_node: int
    prompts: int
    mini_prompts: int
    epochs: int
    n: int
    m: int
    max_prompt: int
    max_response: int
    workers: int  # processes that run agent loops

    @property
    def gpus(self) -> int:
        """All GPUs of the run."""
        return self.trainer.gpus + (self.engine.gpus if self.engine.separate else 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_prompt + self.max_response

    @property
    def updates(self) -> int:
        """Optimizer steps of a training step."""
        return max(1, math.ceil(self.prompts / self.mini_prompts)) * self.epochs


def job_from_config(
    config: DictConfig, model: ModelShape, name: str, *, keep: int | None = None, gpus: int | None = None
) -> Job:
    """Reads a composed verl config.

    Args:
        config: As `pods_plugin.cli.compose.compose` returns it.
        model: The shape of its model.
        name: Of the recipe, for messages.
        keep: Rollouts kept a prompt; None: all.
        gpus: All GPUs of the run instead of the config's number.

    Raises:
        PlanError: The GPUs, heads, layers or experts do not divide as the config asks.
    """

    def get(key: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, key, default=default)
        return default if value is None else value

    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    backend = str(get(f"{actor}.strategy"))
    if backend not in ("fsdp", "fsdp2", "megatron"):
        raise PlanError(f"{actor}.strategy={backend} has no formulas here; expected fsdp, fsdp2 or megatron")
    separate = get("trainer.v1.trainer_mode") == "separate_async"
    per_node = int(get("trainer.n_gpus_per_node", 8))
    train_gpus = int(get("trainer.nnodes", 1)) * per_node
    engine_gpus = train_gpus
    if separate:
        engine_gpus = int(get(f"{rollout}.nnodes", 0)) * int(get(f"{rollout}.n_gpus_per_node", per_node))
        if engine_gpus < 1:
            raise PlanError(f"separate_async generates on GPUs of its own; write {rollout}.nnodes=1")
    if gpus is not None:
        train_gpus, engine_gpus = _scaled(gpus, train_gpus, engine_gpus if separate else 0)
        per_node = min(per_node, gpus) if gpus < per_node else per_node
        if gpus > per_node and gpus % per_node:
            raise PlanError(
                f"--gpus {gpus} does not fill nodes of {per_node}; write a multiple of {per_node}"
            )

    n = int(get(f"{rollout}.n"))
    prompts = int(get("data.train_batch_size"))
    max_prompt, max_response = int(get("data.max_prompt_length")), int(get("data.max_response_length"))
    megatron = backend == "megatron"
    trainer = _megatron(get, actor, train_gpus) if megatron else _fsdp(get, actor, backend, train_gpus)
    longest = max_prompt + max_response
    micro, dynamic = _micro_tokens(
        get, actor, "ppo", longest, trainer.cp, bool(get(f"{actor}.use_dynamic_bsz"))
    )
    log_prob, _ = _micro_tokens(
        get, rollout, "log_prob", longest, trainer.cp, bool(get(f"{rollout}.log_prob_use_dynamic_bsz"))
    )
    lora = int(get("actor_rollout_ref.model.lora_rank", 0)) or int(
        get("actor_rollout_ref.model.lora.rank", 0)
    )
    trainer = dataclasses.replace(
        trainer,
        micro_tokens=micro,
        log_prob_tokens=log_prob,
        dynamic=dynamic,
        lora_rank=lora,
        reference=bool(get(f"{actor}.use_kl_loss")) or bool(get("algorithm.use_kl_in_reward")),
        entropy=float(get(f"{actor}.entropy_coeff", 0)) != 0,
        fused_head=bool(get("actor_rollout_ref.model.use_fused_kernels")),
        old_log_prob=not bool(get("algorithm.rollout_correction.bypass_mode", False)),
    )
    engine = Engine(
        name=str(get(f"{rollout}.name")),
        gpus=engine_gpus,
        tp=int(get(f"{rollout}.tensor_model_parallel_size", 1)),
        pp=int(get(f"{rollout}.pipeline_model_parallel_size", 1)),
        dp=int(get(f"{rollout}.data_parallel_size", 1)),
        ep=int(get(f"{rollout}.expert_parallel_size", 1)),
        utilization=float(get(f"{rollout}.gpu_memory_utilization", 0.5)),
        sequences=int(get(f"{rollout}.max_num_seqs", 256)),
        batched_tokens=int(get(f"{rollout}.max_num_batched_tokens", 8192)),
        max_tokens=int(get(f"{rollout}.max_model_len", longest)),
        eager=bool(get(f"{rollout}.enforce_eager", False)),
        frees_cache=bool(get(f"{rollout}.free_cache_engine", True)),
        prefix_caching=bool(get(f"{rollout}.enable_prefix_caching", True)),
        element=trainer.element,
        separate=separate,
        on_trainer=not separate or bool(get("actor_rollout_ref.hybrid_engine", True)),
    )
    job = Job(
        name=name,
        model=model,
        trainer=trainer,
        engine=engine,
        gpus_per_node=per_node,
        prompts=prompts,
        mini_prompts=int(get(f"{actor}.ppo_mini_batch_size", prompts)),
        epochs=int(get(f"{actor}.ppo_epochs", 1)),
        n=n,
        m=n if keep is None else keep,
        max_prompt=max_prompt,
        max_response=max_response,
        workers=int(get(f"{rollout}.agent.num_workers", 8)),
    )
    _check(job)
    return job


def _scaled(gpus: int, train: int, engine: int) -> tuple[int, int]:
    """`--gpus` shared out as the config does it."""
    if gpus < 1:
        raise PlanError(f"--gpus {gpus} is no number of GPUs; write 1 or more")
    if not engine:
        return gpus, gpus
    if gpus * train % (train + engine):
        raise PlanError(
            f"--gpus {gpus} cannot be shared {train} to {engine} between training and generation; "
            f"write a multiple of {(train + engine) // math.gcd(train, engine)}"
        )
    part = gpus * train // (train + engine)
    return part, gpus - part


def _micro_tokens(
    get: Any, section: str, prefix: str, longest: int, cp: int, dynamic: bool
) -> tuple[int, bool]:
    """Tokens a GPU of the largest micro-batch, and whether it is filled by tokens rather than by sequences."""
    if dynamic:
        limit = get(f"{section}.{prefix}_max_token_len_per_gpu", 16384)
        return max(int(limit), math.ceil(longest / cp)), True
    sequences = get(f"{section}.{prefix}_micro_batch_size_per_gpu")
    if sequences is None:
        raise PlanError(
            f"{section} has neither use_dynamic_bsz nor {prefix}_micro_batch_size_per_gpu; write "
            f"{section}.{prefix}_micro_batch_size_per_gpu=1"
        )
    return math.ceil(int(sequences) * longest / cp), False


def _fsdp(get: Any, actor: str, backend: str, gpus: int) -> Trainer:
    size = int(get(f"{actor}.fsdp_config.fsdp_size", -1))
    mixed = get(
        f"{actor}.fsdp_config.mixed_precision.param_dtype", get(f"{actor}.fsdp_config.dtype", "bfloat16")
    )
    return Trainer(
        backend=backend,
        gpus=gpus,
        cp=int(get(f"{actor}.ulysses_sequence_parallel_size", 1)),
        shard=gpus if size < 1 else min(size, gpus),
        reshard=bool(get(f"{actor}.fsdp_config.reshard_after_forward", True)),
        element=_bytes(mixed),
        weight=_bytes(get(f"{actor}.fsdp_config.model_dtype", "fp32")),
        checkpointing=bool(get("actor_rollout_ref.model.enable_gradient_checkpointing", True)),
        activation_offload=bool(get("actor_rollout_ref.model.enable_activation_offload", False)),
        param_offload=bool(get(f"{actor}.fsdp_config.param_offload", False)),
        optimizer_offload=bool(get(f"{actor}.fsdp_config.optimizer_offload", False)),
        cpu_policy=backend == "fsdp2" and bool(get(f"{actor}.fsdp_config.offload_policy", False)),
    )


def _megatron(get: Any, actor: str, gpus: int) -> Trainer:
    block = f"{actor}.megatron"
    tp = int(get(f"{block}.tensor_model_parallel_size", 1))
    return Trainer(
        backend="megatron",
        gpus=gpus,
        tp=tp,
        pp=int(get(f"{block}.pipeline_model_parallel_size", 1)),
        vpp=int(get(f"{block}.virtual_pipeline_model_parallel_size", 1)),
        cp=int(get(f"{block}.context_parallel_size", 1)),
        ep=int(get(f"{block}.expert_model_parallel_size", 1)),
        etp=int(get(f"{block}.expert_tensor_parallel_size", tp)),
        sequence_parallel=bool(get(f"{block}.sequence_parallel", True)),
        distributed_optimizer=bool(get(f"{block}.use_distributed_optimizer", True)),
        element=_bytes(get(f"{block}.dtype", "bfloat16")),
        weight=2,
        checkpointing=get(f"{block}.override_transformer_config.recompute_granularity") == "full",
        param_offload=bool(get(f"{block}.param_offload", False)),
        optimizer_offload=bool(get(f"{block}.optimizer_offload", False)),
        reference_offload=bool(get("actor_rollout_ref.ref.megatron.param_offload", False)),
    )


def _bytes(dtype: object) -> int:
    return 4 if str(dtype) in ("fp32", "float32", "32", "float") else 2


def _check(job: Job) -> None:
    trainer, engine, model = job.trainer, job.engine, job.model
    parallel = (
        f"tp {trainer.tp} x pp {trainer.pp} x cp {trainer.cp}"
        if trainer.megatron
        else f"sequence parallel {trainer.cp}"
    )
    _divides(trainer.gpus, trainer.model_parallel, "training GPUs", parallel)
    if trainer.megatron and model.experts:
        expert = trainer.etp * trainer.ep * trainer.pp
        _divides(
            trainer.gpus, expert, "training GPUs", f"etp {trainer.etp} x ep {trainer.ep} x pp {trainer.pp}"
        )
        _divides(model.experts, trainer.ep, f"experts of {model.name}", f"ep {trainer.ep}")
    _divides(
        engine.gpus,
        engine.gpus_per_replica,
        "generating GPUs",
        f"rollout tp x pp x dp {engine.gpus_per_replica}",
    )
    for size, what in ((trainer.tp, "tp"), (engine.tp, "rollout tp")):
        _divides(model.heads, size, f"attention heads of {model.name}", f"{what} {size}")
    stages = trainer.pp * trainer.vpp
    _divides(model.layers, stages, f"layers of {model.name}", f"pp {trainer.pp} x vpp {trainer.vpp}")


def _divides(whole: int, part: int, what: str, by: str) -> None:
    if part < 1 or whole % part:
        nearest = max(part, round(whole / part) * part) if part >= 1 else 1
        hint = f"; write --gpus {nearest}" if "training GPUs" in what else ""
        raise PlanError(f"{whole} {what} is not a multiple of {by} = {part}{hint}")
