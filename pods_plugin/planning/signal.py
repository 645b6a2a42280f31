"""What a step can learn: the expected variance of the kept rewards under a profile of pass rates.

A prompt of pass rate p gives n rollouts of reward 0 or 1, k of them 1, k ~ Binomial(n, p). Max-variance keeps m with
c ones, the c as near to m/2 as k and n - k allow, so the kept variance is v = c/m (1 - c/m). The gradient of a group,
1/m sum (r_i - mean) g_i, has mean v d and covariance v/m S if the score functions g_i have means that differ by d
between right and wrong, and covariance S within each: its squared signal-to-noise ratio is m v (|d|^2 / trace S).
Groups are independent, so these add up: `signal` = prompts * m * E[v] is what a step gives, up to a factor of the
model alone, and signal a second compares settings of any n and m. For fixed m it is variance a second.
"""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
from numpy.typing import NDArray

from pods_plugin.planning.errors import PlanError

_Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class PassRates:
    """A profile: either rates, one a prompt, or a Beta distribution of them."""

    rates: tuple[float, ...] = ()
    a: float = 1.0
    b: float = 1.0

    @classmethod
    def parse(cls, text: str) -> PassRates:
        """Reads `0.1,0.3,0.9` or `beta(0.8,1.5)`.

        Raises:
            PlanError: It is neither.
        """
        try:
            if match := re.fullmatch(r"\s*beta\(([^,]+),([^,]+)\)\s*", text, re.IGNORECASE):
                a, b = float(match[1]), float(match[2])
                if 0 < a < math.inf and 0 < b < math.inf:
                    return cls(a=a, b=b)
            else:
                rates = tuple(float(part) for part in text.split(","))
                if all(0 <= rate <= 1 for rate in rates):
                    return cls(rates=rates)
        except ValueError:
            pass
        raise PlanError(
            f'--pass-rates {text}: expected rates in [0, 1] such as 0.1,0.3,0.9, or "beta(0.8,1.5)"'
        )

    def __str__(self) -> str:
        if self.rates:
            return ",".join(f"{rate:g}" for rate in self.rates)
        return f"beta({self.a:.3g},{self.b:.3g})"

    @property
    def mean(self) -> float:
        """The expected reward."""
        return float(np.mean(self.rates)) if self.rates else self.a / (self.a + self.b)

    def right(self, n: int) -> _Floats:
        """(n + 1,) probability that k of n rollouts are right, over the profile: binomial or beta-binomial."""
        k = np.arange(n + 1)
        choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
        if not self.rates:
            log = [
                math.lgamma(i + self.a) + math.lgamma(n - i + self.b) - math.lgamma(n + self.a + self.b)
                for i in k
            ]
            start = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
            return np.asarray(np.exp(choose + np.array(log) - start), dtype=np.float64)
        total = np.zeros(n + 1)
        for rate in self.rates:
            if rate in (0.0, 1.0):
                total[n if rate else 0] += 1
            else:
                total += np.exp(choose + k * math.log(rate) + (n - k) * math.log1p(-rate))
        return total / len(self.rates)


def kept_variance(n: int, m: int, rates: PassRates) -> float:
    """Expected variance (divided by m) of the m rewards that max-variance keeps of n."""
    k = np.arange(n + 1)
    ones = np.clip(m // 2, m - (n - k), k)
    return float(rates.right(n) @ (ones / m * (1 - ones / m)))


def signal(prompts: int, n: int, m: int, rates: PassRates) -> float:
    """Expected squared signal-to-noise ratio of a step's gradient, up to a factor of the model."""
    return prompts * m * kept_variance(n, m, rates)


def beta_of_run(mean: float, group_variance: float, n: int) -> PassRates | None:
    """The Beta profile with a run's mean 0/1 reward and mean group variance of n rollouts; None if there is none.

    E[variance of n] = E[p (1 - p)] (n - 1) / n gives the second moment of p.
    """
    if n < 2 or not 0 < mean < 1:
        return None
    second = mean - group_variance * n / (n - 1)
    spread = second - mean**2
    if not 0 < spread < mean * (1 - mean):
        return None
    total = mean * (1 - mean) / spread - 1
    return PassRates(a=mean * total, b=(1 - mean) * total)
