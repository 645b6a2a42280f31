"""What rewriting cannot do, one function a patch; each runs right after the module that it changes is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt


def install() -> None:
    """Install all patches in this process, now or when their module is imported."""
    hooks: dict[str, Callable[[ModuleType], None]] = {
        "megatron.core.tensor_parallel.random": random_state_of_the_cpu,
        "megatron.core.models.gpt.gpt_layer_specs": stand_in_layers,
        "megatron.core.transformer.moe.moe_utils": experts_without_transformer_engine,
        "megatron.core.optimizer.distrib_optimizer": resume_with_torch_adamw,
        "verl.workers.config.engine": allow_fp32,
    }
    for name, hook in hooks.items():
        wrapt.register_post_import_hook(hook, name)


def random_state_of_the_cpu(module: ModuleType) -> None:
    """megatron-core keeps apart the random states of its parallel groups, by functions inside torch._C."""
    import logging

    import torch

    def get(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def put(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module.__dict__.update(_get_cuda_rng_state=get, _set_cuda_rng_state=put)
    # it warns, for each weight, that the state of the CPU has changed: here that is what is meant
    logging.getLogger(module.__name__).setLevel(logging.ERROR)


def stand_in_layers(module: ModuleType) -> None:
    """mbridge asks for the TransformerEngine variant of a model; there is no TransformerEngine without a GPU."""
    from tests.megatron.stand_ins import layers

    module.__dict__.update(HAVE_TE=True, TENorm=layers.Norm, TESpecProvider=layers.SpecProvider)


def experts_without_transformer_engine(module: ModuleType) -> None:
    """Three things that the routing of tokens to experts takes for granted.

    1. That TransformerEngine is there: without it a name that is looked up, `te_general_gemm`, does not exist.
    2. That sizes of an all-to-all come from a GPU: only when moved from there do they become numbers.
    3. That the stream on which they move can be waited for: torch.cpu's has no such functions.
    """
    import torch

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.__dict__.update(te_general_gemm=None, maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)
    stream: Any = torch.cpu.Stream
    stream.record_event = lambda self: self
    stream.synchronize = lambda self: None


def resume_with_torch_adamw(module: ModuleType) -> None:
    """Checkpoints with torch's AdamW, the only one here; Apex and TransformerEngine bring optimizers of their own.

    1. Its state is asked for before its first step, to know what a checkpoint must hold: it has none yet.
    2. Its fp32 weights are views of the parameters here, and must not be written to while autograd watches.
    3. Its steps, by which it corrects its moments, are not restored, and one tensor is the step of all parameters,
       which is then counted up once for each of them.
    """
    import torch

    optimizer = module.__dict__["DistributedOptimizer"]
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(state_dict)
    def with_state(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        return state_dict(self)

    @functools.wraps(load_state_dict)
    def with_own_steps(self: Any, loaded: Any) -> None:
        steps = [group["step"] for group in loaded["optimizer"]["param_groups"]]
        with torch.no_grad():
            load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(steps[0]))

    optimizer.state_dict, optimizer.load_state_dict = with_state, with_own_steps


def allow_fp32(module: ModuleType) -> None:
    """verl asserts bfloat16 or float16, though all that follows takes float32, in which runs can be compared."""
    config = module.__dict__["McoreEngineConfig"]
    check = config.__post_init__

    @functools.wraps(check)
    def __post_init__(self: Any) -> None:
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16" if dtype == "float32" else dtype)
        check(self)
        object.__setattr__(self, "dtype", dtype)

    config.__post_init__ = __post_init__
