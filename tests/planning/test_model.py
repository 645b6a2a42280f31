from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.model import FACTS, ModelShape, find_model

# What the safetensors files of the hub hold, as its model pages say.
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-32B-Instruct": 32_763_876_352,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen3-30B-A3B": 30_532_122_624,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_weights(name: str) -> None:
    assert find_model(name).parameters == PARAMETERS[name]


def test_active_parameters_of_a_mixture(moe: ModelShape) -> None:
    assert moe.active_parameters == pytest.approx(3.3e9, rel=0.02)  # the "A3B" of its model card: 3.3B
    assert moe.parameters - moe.active_parameters == 48 * 120 * 3 * 2048 * 768  # 120 of 128 experts rest


def test_lora_of_a_layer_by_hand() -> None:
    shape = find_model("Qwen2.5-7B-Instruct")
    # q and o: 3584 + 3584, k and v: 3584 + 512, gate, up and down: 3584 + 18944
    assert shape.lora_parameters(64) == 28 * 64 * (2 * 7168 + 2 * 4096 + 3 * 22528)


def test_kv_cache_of_a_token_by_hand() -> None:
    assert find_model("Qwen2.5-7B-Instruct").kv_bytes() == 2 * 28 * 512 * 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_flops_are_verls_but_for_the_embedding(name: str) -> None:
    """verl counts the embedding as a matrix too: 6 * vocabulary * hidden a token for a look-up."""
    counter = pytest.importorskip("verl.utils.flops_counter")
    config = json.loads((FACTS / f"{name}.json").read_text())
    shape, lengths = find_model(name), [700, 1300, 90]
    verl_teraflops, _ = counter.FlopsCounter(SimpleNamespace(**config)).estimate_flops(lengths, 1.0)
    ours = 3 * shape.forward_flops(sum(lengths), sum(length**2 for length in lengths))
    embedding = 6 * shape.vocab * shape.hidden * sum(lengths)
    assert verl_teraflops * 1e12 == pytest.approx(ours + embedding, rel=1e-9)


def test_a_folder_with_config_json_is_read(tmp_path: Path) -> None:
    config = json.loads((FACTS / "Qwen2.5-3B-Instruct.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert find_model(str(tmp_path)).layers == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3moe"}, "nearest: qwen3_moe"),
        ({"model_type": "mamba"}, "no formulas"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "in some layers only"),
    ],
)
def test_what_cannot_be_read_is_one_line(change: dict[str, object], message: str) -> None:
    config = json.loads((FACTS / "Qwen2.5-3B-Instruct.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(PlanError, match=message) as caught:
        ModelShape.from_config(config, "some")
    assert "\n" not in str(caught.value)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"nearest: Qwen2.5-7B-Instruct"):
        find_model("Qwen/Qwen2.5-7b-Instruct-1M")
