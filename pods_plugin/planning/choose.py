"""GRPO and PODS side by side, and the n and m that give most for their time."""

from __future__ import annotations

import dataclasses

from pods_plugin.planning.gpus import GPU
from pods_plugin.planning.job import Job
from pods_plugin.planning.signal import PassRates, kept_variance, signal
from pods_plugin.planning.steptime import Efficiencies, Lengths, step_seconds

# n as multiples of m; m as multiples of the recipe's
_MORE = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16)
_KEEP = (0.25, 0.5, 1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One n and m.

    Attributes:
        variance: Expected variance of a prompt's kept rewards.
        seconds: Of a step by phase, and `step`.
        rate: Signal a second; for one m it is proportional to variance a second.
    """

    n: int
    m: int
    variance: float
    seconds: dict[str, float]
    rate: float

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"GRPO n={self.n}" if self.n == self.m else f"PODS {self.n} -> {self.m}"


@dataclasses.dataclass(frozen=True)
class Situation:
    """What the seconds and the variance of a setting depend on besides n and m."""

    job: Job
    gpu: GPU
    lengths: Lengths
    efficiencies: Efficiencies
    rates: PassRates

    def setting(self, n: int, m: int) -> Setting:
        """The run with this n and m instead of its own."""
        job = dataclasses.replace(self.job, n=n, m=m)
        seconds = step_seconds(job, self.gpu, self.lengths, self.efficiencies)
        rate = signal(job.prompts, n, m, self.rates) / seconds["step"]
        return Setting(n, m, kept_variance(n, m, self.rates), seconds, rate)

    def compared(self) -> list[Setting]:
        """GRPO with the kept number, GRPO with the generated number, and PODS; GRPO alone where nothing is dropped."""
        n, m = self.job.n, self.job.m
        return [self.setting(a, b) for a, b in dict.fromkeys([(m, m), (n, n), (n, m)])]

    def by_n(self, m: int) -> list[Setting]:
        """Settings that keep m, by rising n."""
        numbers = sorted(
            {max(m, round(m * more)) for more in _MORE} | ({self.job.n} if self.job.n >= m else set())
        )
        return [self.setting(n, m) for n in numbers]

    def best(self, m: int) -> Setting:
        """The n that gives most variance a second for this m; the smallest of equals."""
        return max(self.by_n(m), key=lambda setting: setting.rate)

    def best_of_all(self) -> list[Setting]:
        """The best n for every m that a mini-batch can be split with, the best first."""
        dp = self.job.trainer.dp
        kept = sorted({max(2, round(self.job.m * part)) for part in _KEEP})
        kept = [m for m in kept if self.job.mini_prompts * m % dp == 0] or [self.job.m]
        return sorted((self.best(m) for m in kept), key=lambda setting: -setting.rate)
