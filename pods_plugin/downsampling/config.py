"""DownsampleConfig: `algorithm.downsample` and its `downsample_kwargs`, checked, with m made a count."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pods_plugin.downsampling.rules import DownsampleError, brief, nearest, resolve_rule, rule_names

AdvantageStats = Literal["kept", "group"]

_RULE_KEY = "algorithm.downsample"
_KWARGS_KEY = "algorithm.downsample_kwargs"


@dataclass(frozen=True, kw_only=True)
class DownsampleConfig:
    """What to keep of each prompt's rollouts, and how.

    Attributes:
        rule: A rule's name or `module:function`.
        generated: n, rollouts generated for each prompt.
        keep: m, rollouts kept of each prompt, 1 <= m <= n.
        metric: What the rule compares: `reward`, or a key of the reward function's extra info.
        advantage_stats: The rollouts whose mean and deviation make the advantages: `kept` (PODS) or the whole
            `group`.
        drop_zero_variance: Keep nothing of a group whose rewards are all equal.
        seed: Decides ties, together with the step and the group.
    """

    rule: str
    generated: int
    keep: int
    metric: str = "reward"
    advantage_stats: AdvantageStats = "kept"
    drop_zero_variance: bool = False
    seed: int = 0

    @property
    def identity(self) -> bool:
        """Whether every rollout is kept, so that training is verl's own."""
        return self.keep == self.generated and not self.drop_zero_variance

    @classmethod
    def from_mapping(
        cls, downsample: object, kwargs: Mapping[str, Any] | None, rollout_n: int
    ) -> DownsampleConfig | None:
        """Reads and checks the user's settings.

        Args:
            downsample: `algorithm.downsample`: None is off, otherwise a rule.
            kwargs: `algorithm.downsample_kwargs`; `keep` is an int (rollouts) or a float in (0, 1], a
                fraction f of n (round(f * n) rollouts; 1.0 is all of them, while the int 1 is one rollout).
            rollout_n: `actor_rollout_ref.rollout.n`.

        Returns:
            The settings, or None if down-sampling is off (`kwargs` are then not looked at).

        Raises:
            DownsampleError: A setting that cannot be used; one line that says what to write instead.
        """
        if downsample is None:
            return None
        rule = _read_rule(downsample)
        n = _read_n(rollout_n)
        if kwargs is None:
            kwargs = {}
        if not isinstance(kwargs, Mapping):
            raise DownsampleError(
                f"{_KWARGS_KEY}={brief(kwargs)}; expected a mapping: write {_KWARGS_KEY}.keep=16"
            )
        known = [field.name for field in fields(cls) if field.name not in ("rule", "generated")]
        for key in kwargs:
            if key not in known:
                raise DownsampleError(
                    f"{_KWARGS_KEY}.{key} is unknown{nearest(key, known)}; expected one of {', '.join(known)}"
                )
        return cls(
            rule=rule,
            generated=n,
            keep=_read_keep(kwargs.get("keep"), n),
            metric=_read_metric(kwargs.get("metric", cls.metric)),
            advantage_stats=_read_advantage_stats(kwargs.get("advantage_stats", cls.advantage_stats)),
            drop_zero_variance=_read_flag(kwargs.get("drop_zero_variance", cls.drop_zero_variance)),
            seed=_read_seed(kwargs.get("seed", cls.seed)),
        )


def _read_rule(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DownsampleError(
            f"{_RULE_KEY}={brief(value)}; expected a rule ({', '.join(rule_names())}, or module:function): "
            f"write {_RULE_KEY}=max_variance, or {_RULE_KEY}=null for none"
        )
    if value.lower() in ("none", "null", "off", "false", "no") and value not in rule_names():
        raise DownsampleError(
            f"{_RULE_KEY}={value!r} is no rule; to switch down-sampling off write {_RULE_KEY}=null"
        )
    try:
        resolve_rule(value)
    except DownsampleError as error:
        raise DownsampleError(f"{_RULE_KEY}={brief(value, quote=False)}: {error}") from error
    return value


def _read_n(value: object) -> int:
    key = "actor_rollout_ref.rollout.n"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise DownsampleError(
            f"{key}={brief(value)}; expected an int, the rollouts of each prompt: write {key}=64"
        )
    if value == 1:
        raise DownsampleError(
            f"{key}=1 leaves nothing to choose from; expected at least 2: write {key}=64, or {_RULE_KEY}=null"
        )
    return int(value)


def _read_keep(value: object, n: int) -> int:
    key = f"{_KWARGS_KEY}.keep"
    example = max(1, n // 4)
    expected = f"expected an int in 1..{n} (rollout.n) or a fraction in (0, 1]: write {key}={example}"
    if value is None:
        raise DownsampleError(f"{key} is missing; {expected}")
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        hint = f"{key}={value.strip()} without quotes" if math.isfinite(number) else f"{key}={example}"
        raise DownsampleError(
            f"{key}={value!r} is a string; expected an int in 1..{n} or a fraction in (0, 1]: write {hint}"
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DownsampleError(f"{key}={brief(value)}; {expected}")
    if isinstance(value, numbers.Integral):
        if int(value) > n:
            raise DownsampleError(
                f"{key}={value} is more than actor_rollout_ref.rollout.n={n}; {expected}, or raise rollout.n"
            )
        if int(value) < 1:
            raise DownsampleError(f"{key}={value}; {expected}")
        return int(value)
    fraction = float(value)
    if not 0.0 < fraction <= 1.0:  # also refuses nan
        raise DownsampleError(f"{key}={value}; {expected}")
    kept = round(fraction * n)
    if kept == 0:
        raise DownsampleError(f"{key}={value} of rollout.n={n} rounds to 0 rollouts; {expected}")
    return kept


def _read_metric(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DownsampleError(
            f"{_KWARGS_KEY}.metric={brief(value)}; expected a name: write {_KWARGS_KEY}.metric=reward, "
            "or a key of the reward's extra info"
        )
    return value


def _read_advantage_stats(value: object) -> AdvantageStats:
    for choice in get_args(AdvantageStats):
        if value == choice:
            return choice
    key = f"{_KWARGS_KEY}.advantage_stats"
    raise DownsampleError(
        f"{key}={brief(value)}; expected kept or group: write {key}=kept (PODS), "
        f"or {key}=group to use all n rewards"
    )


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        key = f"{_KWARGS_KEY}.drop_zero_variance"
        raise DownsampleError(f"{key}={brief(value)}; expected true or false: write {key}=true")
    return value


def _read_seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 0:
        raise DownsampleError(
            f"{_KWARGS_KEY}.seed={brief(value)}; expected an int >= 0: write {_KWARGS_KEY}.seed=0"
        )
    return int(value)
