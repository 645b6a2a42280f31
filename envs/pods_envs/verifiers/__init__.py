"""Verification of final answers: extraction, cleaning, exact comparison, killable computer algebra."""

from pods_envs.verifiers.extraction import extract
from pods_envs.verifiers.judge import verify, verify_async, verify_many
from pods_envs.verifiers.pool import close_pool

__all__ = ["close_pool", "extract", "verify", "verify_async", "verify_many"]
