#!/usr/bin/env bash
# One GPU, a few minutes, nothing to download: does the 1-GPU recipe run here, do vLLM and trainer agree, what does
# down-sampling save? Five steps with it and five without, and one line of JSON on the last line of the output.
#
#   benchmarks/gpu_smoke.sh             a model of 10M parameters that is made here, procedural GSM8K
#   MODEL=Qwen/Qwen2.5-0.5B-Instruct benchmarks/gpu_smoke.sh     a real model: from the hub, or a folder
#   benchmarks/gpu_smoke.sh --cpu       a rehearsal without a GPU: the same recipe with +cpu=shrink
#
# Needs verl-pods beside verl and vLLM (--cpu: verl-pods[cpu]). PODS and PYTHON name the programs, OUT the folder for the
# runs. Exit code 1: a run failed, or log-probs disagree.
set -euo pipefail

case "${1:-}" in
    "") device=gpu ;;
    --cpu) device=cpu ;;
    *) echo "usage: $0 [--cpu]" >&2; exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
pods=${PODS:-pods}
python=${PYTHON:-python}
out=${OUT:-$(mktemp -d)}
steps=5

if [[ $device == gpu ]]; then
    nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null || { echo "no GPU here; try --cpu" >&2; exit 2; }
    model=${MODEL:-$out/model}
    "$python" - "$out" "$model" "${MODEL:+given}" <<'PYTHON'
import random
import sys

import gymnasium
import pods_envs  # noqa: F401

from pods_plugin.cpu.models import build_tiny_model, warm_up
from pods_plugin.integration.data import write_parquet

out, model, given = sys.argv[1:]
problems = {"source": "procedural", "size": 512}
if not given:
    problems |= {"size": 16, "prompt_template": "{question}"}
    # heads of 64, which vLLM's attention kernels take
    build_tiny_model(model, hidden_size=512, heads=8, layers=4, context=1024)
    env = gymnasium.make("pods/GSM8K-v0", **problems).unwrapped
    draw = random.Random(0)
    guesses = [
        (env.messages(problem)[-1]["content"], env.reference_response(draw.choice(env.problems)))
        for problem in env.problems
        for _ in range(8)
    ]
    warm_up(model, guesses, steps=60, batch_size=8)  # so that some rollouts are right
write_parquet("pods/GSM8K-v0", f"{out}/data", env_kwargs=problems)
PYTHON
    common=(
        "actor_rollout_ref.model.path=$model"
        "data.train_files=$out/data/train.parquet"
        "data.val_files=$out/data/test.parquet"
        data.max_response_length=128
        trainer.val_before_train=false
    )
else
    common=(+cpu=shrink "shrink.steps=$steps")
fi
common+=("trainer.total_training_steps=$steps" trainer.test_freq=-1 trainer.save_freq=-1 "trainer.logger=[console,file]")

run() { # NAME OVERRIDES...: the recipe's output goes to stderr, so that stdout holds the result alone
    local name=$1
    shift
    "$pods" train --config-dir "$root/recipes/fsdp" --config-name gsm8k_qwen2.5_3b_lora_1gpu \
        --runs-dir "$out" --name "$name" "${common[@]}" "$@" >&2
}
run downsampled
run everything algorithm.downsample=null

"$python" - "$out" "$device" <<'PYTHON'
import json
import pathlib
import subprocess
import sys

out, device = pathlib.Path(sys.argv[1]), sys.argv[2]
phases = {"generate": "gen", "log_prob": "old_log_prob", "update": "update_actor", "sync": "update_weights", "step": "step"}


def load(name):
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in (json.loads(line)["data"] for line in lines) if "actor/grad_norm" in row]


def seconds(rows):
    # not of the first step, which compiles and warms up
    return {
        phase: round(sum(row[f"timing_s/{key}"] for row in rows[1:]) / len(rows[1:]), 3) for phase, key in phases.items()
    }


kept, everything = load("downsampled"), load("everything")
with_it, without = seconds(kept), seconds(everything)
difference = max(row["training/rollout_probs_diff_mean"] for row in kept + everything)
limit = 0.02 if device == "gpu" else 1e-5  # bf16 and other kernels, or fp32 on both sides
name = "cpu"
if device == "gpu":
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
result = {
    "device": name,
    "steps": len(kept),
    "generated": int(kept[-1]["downsample/generated"]),
    "kept": int(kept[-1]["downsample/kept"]),
    "probs_diff_mean": difference,
    "probs_diff_max": max(row["training/rollout_probs_diff_max"] for row in kept + everything),
    "agree": difference < limit,
    "seconds": with_it,
    "seconds_without": without,
    "update_ratio": round(without["update"] / with_it["update"], 2),
    "log_prob_ratio": round(without["log_prob"] / with_it["log_prob"], 2),
}
print(json.dumps(result))
sys.exit(0 if result["agree"] else 1)
PYTHON
