"""verl's MegatronEngine without Ray: log-probs, updates, export, resume.

    python -c "from tests.megatron.engine_check import main; main('FOLDER')"

(With -c and not -m, since a process that megatron-core spawns to save a checkpoint runs the main module again.) FOLDER
holds model/ (a Hugging Face model) and one NAME.yaml for each run: a whole config, from shrink.py, whose
`actor_rollout_ref` says everything. The runs are made one after the other, each on as many processes as its parallel
sizes need, forked from this one, so that the imports, most of the time, are paid once. All of them see the same batch.
Writes FOLDER/results.json: for each run what `Rank.run` reports, of every rank that has outputs.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.engine.megatron.transformer_impl  # noqa: F401  most of the imports, before the fork
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from tests.megatron.shrink import PROMPT, RESPONSE, ROWS, ranks

STEPS = 3
TIMEOUT_S = 300

Batch = dict[str, Tensor]


def main(path: str) -> None:
    folder = Path(path)
    torch.set_num_threads(1)
    batch = make_batch(folder)
    results = {}
    for file in sorted(folder.glob("*.yaml")):
        config = OmegaConf.load(file)
        assert isinstance(config, DictConfig)
        fork(folder, file.stem, config, batch, resume=False)
        fork(folder, file.stem, config, batch, resume=True)
        results[file.stem] = [
            json.loads(part.read_text()) | json.loads(part.with_suffix(".resumed.json").read_text())
            for part in sorted(folder.glob(f"{file.stem}-rank?.json"))
        ]
    (folder / "results.json").write_text(json.dumps(results, indent=1))


def make_batch(folder: Path) -> Batch:
    """Rows of unequal length, padded left and right, with old and reference log-probs near those of the model."""
    torch.manual_seed(1)
    ids = torch.randint(3, 250, (ROWS, PROMPT + RESPONSE))
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, : row % 3] = 0
        mask[row, PROMPT + RESPONSE - row % 4 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    log_probs = hugging_face_log_probs(folder / "model", batch)
    return batch | {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
        "advantages": torch.randn(ROWS, 1).expand(ROWS, RESPONSE).contiguous(),
        # apart from what the model says, so that ratios differ from 1 and some are clipped
        "old_log_probs": log_probs + 0.2 * torch.randn_like(log_probs),
        "ref_log_prob": log_probs + 0.2 * torch.randn_like(log_probs),
    }


def hugging_face_log_probs(folder: Path, batch: Batch) -> Tensor:
    """Log-probs of the responses by the model in a folder, [rows, RESPONSE]; every weight must be in it."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, PROMPT:, None]).squeeze(-1)


def fork(folder: Path, name: str, config: DictConfig, batch: Batch, *, resume: bool) -> None:
    """One run, or what follows on its checkpoint: its ranks as processes; ends them all when one fails."""
    context = multiprocessing.get_context("fork")
    processes = []
    for rank in range(ranks(config)):
        process = context.Process(target=run_rank, args=(folder, name, config, batch, rank, resume))
        process.start()
        processes.append(process)
    left = list(processes)
    while left:
        multiprocessing.connection.wait([process.sentinel for process in left])
        for process in [process for process in left if not process.is_alive()]:
            left.remove(process)
            if process.exitcode:
                for other in left:
                    other.kill()
                raise SystemExit(
                    f"{name}: rank {processes.index(process)} ended with code {process.exitcode}"
                )


def run_rank(folder: Path, name: str, config: DictConfig, batch: Batch, rank: int, resume: bool) -> None:
    store = dist.FileStore(str(folder / f"{name}-store-{resume}"), ranks(config))
    dist.init_process_group(
        "cpu:gloo", store=store, rank=rank, world_size=ranks(config), timeout=timedelta(seconds=TIMEOUT_S)
    )
    files = folder / f"{name}-rank{rank}"
    process = Rank(config, batch)
    report = process.resume(folder, name, files) if resume else process.run(folder, name, files)
    if report is not None:
        files.with_suffix(".resumed.json" if resume else ".json").write_text(json.dumps(report))
    dist.destroy_process_group()


class Rank:
    """One process of a run: the engine, built of the config as verl's ActorRolloutRefWorker does, and its rows."""

    def __init__(self, config: DictConfig, batch: Batch) -> None:
        actor_config = config.actor_rollout_ref.actor
        rollout_config = config.actor_rollout_ref.rollout
        model: Any = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        actor: Any = omega_conf_to_dataclass(actor_config)
        actor.model_config = model
        engine_config = actor.engine
        engine_config.use_dynamic_bsz = actor_config.use_dynamic_bsz
        engine_config.max_token_len_per_gpu = actor_config.ppo_max_token_len_per_gpu
        engine_config.micro_batch_size_per_gpu = actor_config.ppo_micro_batch_size_per_gpu
        engine_config.infer_max_token_len_per_gpu = rollout_config.log_prob_max_token_len_per_gpu
        engine_config.infer_micro_batch_size_per_gpu = rollout_config.log_prob_micro_batch_size_per_gpu
        engine_config.use_remove_padding = model.use_remove_padding
        engine_config.use_fused_kernels = model.use_fused_kernels
        self.engine: Any = EngineRegistry.new(
            model_type="language_model",
            backend=engine_config.strategy,
            model_config=model,
            engine_config=engine_config,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
        self.engine.initialize()
        self.engine_config = engine_config
        self.entropy = actor_config.entropy_coeff != 0
        self.loss = partial(ppo_loss, config=actor)
        part, parts = self.engine.get_data_parallel_rank(), self.engine.get_data_parallel_size()
        self.batch = {key: value.chunk(parts)[part].contiguous() for key, value in batch.items()}

    def run(self, folder: Path, name: str, files: Path) -> dict[str, Any] | None:
        """The check, but for resume. A fourth step, after the checkpoint, ends in log-probs kept in `files`.pt.

        Returns:
            None on a rank without outputs. Else losses and gradient norms of the steps, log-probs' largest distance to
            Hugging Face's: at the start, and after the steps to those of the exported weights; and how far the steps
            moved the log-probs.
        """
        before = self.log_probs()
        losses, grad_norms = [], []
        for _ in range(STEPS):
            loss, grad_norm = self.train()
            losses.append(loss)
            grad_norms.append(grad_norm)
        after = self.log_probs()
        exported = self.export(folder, name)
        self.engine.save_checkpoint(str(folder / f"{name}-checkpoint"), global_step=STEPS)
        self.train()
        torch.save(self.log_probs(), files.with_suffix(".pt"))
        if before is None or after is None:
            return None
        real = self.batch["response_mask"].bool()
        start = hugging_face_log_probs(folder / "model", self.batch)
        end = hugging_face_log_probs(exported, self.batch)
        return {
            "losses": losses,
            "grad_norms": grad_norms,
            "log_prob_diff": (before - start)[real].abs().max().item(),
            "exported_log_prob_diff": (after - end)[real].abs().max().item(),
            "moved": (after - before)[real].abs().max().item(),
        }

    def resume(self, folder: Path, name: str, files: Path) -> dict[str, Any] | None:
        """In new processes: how far from the run's fourth step one ends that starts at its checkpoint."""
        self.engine.load_checkpoint(str(folder / f"{name}-checkpoint"), del_local_after_load=False)
        self.train()
        resumed, went_on = self.log_probs(), torch.load(files.with_suffix(".pt"))
        return None if resumed is None else {"resumed_diff": (resumed - went_on).abs().max().item()}

    def data(self, *, train: bool) -> Any:
        """The rows as verl's trainer hands them to its workers."""
        config = self.engine_config
        data = left_right_2_no_padding(tu.get_tensordict(dict(self.batch), {"temperature": 1.0}))
        tu.assign_non_tensor(
            data,
            use_remove_padding=config.use_remove_padding,
            use_fused_kernels=config.use_fused_kernels,
            use_dynamic_bsz=config.use_dynamic_bsz,
            max_token_len_per_gpu=config.max_token_len_per_gpu
            if train
            else config.infer_max_token_len_per_gpu,
            micro_batch_size_per_gpu=(
                config.micro_batch_size_per_gpu if train else config.infer_micro_batch_size_per_gpu
            ),
            global_batch_size=ROWS,
            calculate_entropy=self.entropy or not train,
        )
        return data

    def log_probs(self) -> Tensor | None:
        """The engine's log-probs of the responses, [rows, RESPONSE]; None on a rank without outputs."""
        data = self.data(train=False)
        with self.engine.eval_mode():
            output = self.engine.infer_batch(data, loss_function=None)
        if not self.engine.is_mp_src_rank_with_outputs():
            return None
        return no_padding_2_padding(output["model_output"]["log_probs"], data).float()

    def train(self) -> tuple[float, float]:
        """One update. Returns its loss, the mean over the data-parallel ranks as verl reports it, and gradient norm."""
        with self.engine.train_mode():
            output: Mapping[str, Any] = self.engine.train_batch(
                self.data(train=True), loss_function=self.loss
            )
            self.engine.lr_scheduler_step()
        if not self.engine.is_mp_src_rank_with_outputs():
            return float("nan"), float("nan")
        loss = torch.tensor(output["loss"], dtype=torch.float64).sum()
        dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=self.engine.get_data_parallel_group())
        return loss.item() / self.engine.get_data_parallel_size(), float(output["metrics"]["grad_norm"])

    def export(self, folder: Path, name: str) -> Path:
        """Write the weights that verl would send to its rollout engine as a Hugging Face folder."""
        exported = folder / f"{name}-exported"
        weights = {
            key: value.detach().clone().contiguous() for key, value in self.engine.get_per_tensor_param()[0]
        }
        if dist.get_rank() == 0:
            exported.mkdir()
            save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
            for file in ("config.json", "generation_config.json"):
                (exported / file).write_bytes((folder / "model" / file).read_bytes())
        dist.barrier()
        return exported
