"""Verification of final answers: extraction, cleaning, exact comparison, computer algebra in killable processes."""

from pods_envs.verifiers.extraction import extract
from pods_envs.verifiers.judge import verify, verify_async, verify_many
from pods_envs.verifiers.pool import close_pool

__all__ = ["close_pool", "extract", "verify", "verify_async", "verify_many"]
