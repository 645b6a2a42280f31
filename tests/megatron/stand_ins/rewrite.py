"""An import hook that rewrites CUDA out of the sources of megatron-core and mbridge while they are imported.

Only the files in REWRITES are touched: those whose hard-coded CUDA these tests reach. torch itself is left alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

# What is written in a source, and what is to be there on a machine without a GPU.
RULES = [
    (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
    (r"""(device(?:_type)?\s*=\s*)(["'])cuda\2""", r'\1"cpu"'),
    # names of tensor types, compared with what tensor.type() gives
    (r"torch\.cuda\.(Half|BFloat16|Float)Tensor", r"torch.\1Tensor"),
    (r"\.cuda\((?:torch\.device\(\"cpu\"\))?\)", ".cpu()"),
    (r"torch\.cuda\.synchronize\(\)", "None"),
    (r"torch\.cuda\.(manual_seed|get_rng_state)\b", r"torch.\1"),
    # torch.cpu has streams that do nothing
    (r"torch\.cuda\.(Stream|current_stream|stream)\b", r"torch.cpu.\1"),
]

# Rewrites in each file. A number that is not met fails the import: then upstream's text has changed.
REWRITES = {
    "mbridge.core.util": 3,
    "megatron.core.dist_checkpointing.exchange_utils": 5,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": 1,
    "megatron.core.dist_checkpointing.strategies.fully_parallel": 2,
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": 2,
    "megatron.core.distributed.param_and_grad_buffer": 5,
    "megatron.core.models.common.embeddings.rotary_pos_embedding": 3,
    "megatron.core.models.common.language_module.language_module": 1,
    "megatron.core.optimizer.clip_grads": 6,
    "megatron.core.optimizer.distrib_optimizer": 11,
    "megatron.core.optimizer.optimizer": 13,
    "megatron.core.pipeline_parallel.p2p_communication": 8,
    "megatron.core.pipeline_parallel.schedules": 3,
    "megatron.core.tensor_parallel.layers": 10,
    "megatron.core.tensor_parallel.mappings": 5,
    "megatron.core.tensor_parallel.random": 7,
    "megatron.core.transformer.module": 4,
    "megatron.core.transformer.moe.router": 6,
    "megatron.core.transformer.moe.token_dispatcher": 4,
    "megatron.core.utils": 10,
}


def rewrite(source: str) -> tuple[str, int]:
    """Apply RULES to a module's source. Returns the new source and the number of rewrites."""
    total = 0
    for pattern, replacement in RULES:
        source, count = re.subn(pattern, replacement, source)
        total += count
    return source, total


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of REWRITES."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source, count = rewrite(importlib.util.decode_source(self.get_data(path)))
        if count != REWRITES[fullname]:
            raise ImportError(
                f"{fullname}: {count} places of hard-coded CUDA, {REWRITES[fullname]} expected "
                "(tests/megatron/stand_ins/rewrite.py): the stand-ins do not know this release."
            )
        return compile(source, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REWRITES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Install the hook in this process. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # Behind wrapt's finder, which puts itself first and asks the others, so that the hooks of patches.py run too.
    sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), _Finder())
