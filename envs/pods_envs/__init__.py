"""Reasoning environments for gymnasium: importing this package registers `pods/...` ids, and other packages' own."""

from pods_envs.base import AnyText, Problem, ReasoningEnv, Verdict, Verifier
from pods_envs.registration import env_class, env_spec, load_entry_points, register_envs
from pods_envs.sources import load_problems
from pods_envs.verifiers import verify, verify_async, verify_many

__all__ = [
    "AnyText",
    "Problem",
    "ReasoningEnv",
    "Verdict",
    "Verifier",
    "env_class",
    "env_spec",
    "load_problems",
    "verify",
    "verify_async",
    "verify_many",
]

register_envs()
load_entry_points()
