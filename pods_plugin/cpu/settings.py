"""Environment variables of an embedded run, and the few that can be set by hand. Imports nothing heavy."""

from __future__ import annotations

import os
import secrets

# What the launcher sets before it starts verl for a run with trainer.device=cpu. Ray workers inherit it.
ENVIRONMENT: dict[str, str] = {
    # verl then takes our platform from its registry, and the plugin's entry point calls activate().
    "VERL_PLATFORM": "cpu",
    # verl registers its FSDP engines under "cuda" only; they are plain torch and run on the CPU as they are.
    "VERL_ENGINE_DEVICE": "cuda",
    # Despite its name the only switch that keeps Ray, and with it TransferQueue and verl's stores, which ask
    # Ray for the node's address, on loopback: Ray replaces a node_ip_address of 127.0.0.1 by that of the
    # network otherwise.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Without these Ray writes a token into the user's home folder. A token of the run's own also keeps other
    # users of the machine out of its cluster, and two runs apart.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # No telemetry from an embedded run.
    "RAY_USAGE_STATS_ENABLED": "0",
    # A fast tokenizer's thread pool deadlocks in forked workers, and would fight torch for the cores.
    "TOKENIZERS_PARALLELISM": "false",
    # TransferQueue sets torch to this many threads, default 8, around every put and get, in each process that
    # does one.
    "TQ_NUM_THREADS": "1",
    # Idle OpenMP threads spin by default. On a few cores that trainer, rollout and agent loops share, they
    # spin while the thread they wait for has no core: generation took up to six times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
    # gloo listens on the interface that the host name resolves to unless told otherwise.
    "GLOO_SOCKET_IFNAME": "lo",
}


def timeout_s() -> float:
    """Seconds that a wait may take before the run ends with a message: `PODS_CPU_TIMEOUT_S`, default 600."""
    return _positive("PODS_CPU_TIMEOUT_S", 600.0)


def cpu_threads() -> int:
    """Threads for torch in a process that has the machine to itself: `PODS_CPU_THREADS`, default all."""
    try:
        cores = len(os.sched_getaffinity(0))  # respects taskset and containers, where cpu_count() does not
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, int(_positive("PODS_CPU_THREADS", float(cores))))


def _positive(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{name}={text!r} is not a positive number; unset it for the default, {default:g}.")
    return value
