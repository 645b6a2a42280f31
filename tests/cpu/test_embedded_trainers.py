from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from pods_plugin.cpu.trainers import (
    EXIT_CODE,
    POLL_INTERVAL_S,
    EmbeddedTrainerMixin,
    Watchdog,
    actors_of,
    install_trainers,
    last_checkpoint,
    progress_of,
)


def watch(
    actors: dict[str, Any], progress: Callable[[], object] = lambda: time.monotonic(), **settings: Any
) -> tuple[Watchdog, list[int]]:
    codes: list[int] = []
    settings = {
        "stall_s": 60.0,
        "grace_s": 0.2,
        "interval_s": 0.1,
        "checkpoint": lambda: "runs/x/global_step_7",
        **settings,
    }
    watchdog = Watchdog(actors=lambda: actors, progress=progress, leave=codes.append, **settings)
    watchdog.start()
    return watchdog, codes


@pytest.fixture
def make_actor(ray_cluster: None) -> Any:
    import ray

    class Plain:
        def work(self, seconds: float) -> None:
            time.sleep(seconds)

    handles = []

    def make(cls: type = Plain) -> Any:
        handles.append(ray.remote(cls).options(num_cpus=0).remote())
        ray.get(handles[-1].__ray_ready__.remote())
        return handles[-1]

    yield make
    for handle in handles:
        ray.kill(handle)


def test_the_best_and_the_worst_of_what_is_dumped_stand_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Base:
        def _dump_generations(self, *args: Any, **kwargs: Any) -> None:
            self.dumped = args, kwargs

    class Trainer(EmbeddedTrainerMixin, Base):
        global_steps = 3

    trainer = Trainer()
    given = (["1+1=", "2+2=", "3+3="], ["5", "4", "é\n7"], ["2", "4", "6"], [0.0, 1.0, -0.5])
    trainer._dump_generations(*given, dump_path="x")
    assert trainer.dumped == (given, {"dump_path": "x"})
    best, worst = capsys.readouterr().out.split("step 3, ")[1:]
    assert best.startswith("best of 3: reward 1.00, reference '4'") and "'2+2='" in best
    assert worst.startswith("worst of 3: reward -0.50, reference '6'") and r"'é\n7'" in worst
    trainer._dump_generations([], [], [], [])
    assert capsys.readouterr().out == ""


def test_a_dead_actor_ends_the_run_with_one_line(make_actor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    alive, victim = make_actor(), make_actor()
    watchdog, codes = watch({"agent loop worker 0": alive, "rollout server hf_server_0": victim})
    time.sleep(0.5)
    assert watchdog.is_alive() and codes == []
    ray.kill(victim)
    watchdog.join(15)
    assert codes == [EXIT_CODE]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verl-pods:")]
    assert len(lines) == 1
    assert lines[0].startswith("verl-pods: the run ends, rollout server hf_server_0 died: ")
    assert "resume from runs/x/global_step_7" in lines[0]
    assert len(lines[0]) < 400


def test_a_trainer_that_fails_by_itself_is_left_to(
    make_actor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    victim = make_actor()
    watchdog, codes = watch({"training worker 0": victim}, grace_s=20.0, checkpoint=lambda: None)
    time.sleep(0.3)
    ray.kill(victim)
    while "pods:" not in (err := capsys.readouterr().err):
        time.sleep(0.1)
    watchdog.stop()  # what fit() does on its way out
    watchdog.join(5)
    assert codes == [] and not watchdog.is_alive()
    assert "training worker 0 died" in err and "there is no checkpoint yet" in err


def test_a_trainer_that_failed_first_still_says_who_died(
    make_actor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    victim = make_actor()
    watchdog, codes = watch({"training worker 0": victim}, interval_s=30.0)
    ray.kill(victim)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # until Ray knows: on a busy machine that takes a moment
            ray.get(victim.__ray_ready__.remote(), timeout=60)
    watchdog.stop(failed=True)
    watchdog.join(60)
    assert codes == []
    assert "pods: the run ends, training worker 0 died: " in capsys.readouterr().err
    alive, _ = watch({"training worker 0": make_actor()})
    alive.stop(failed=True)
    alive.stop()
    assert "pods:" not in capsys.readouterr().err


def test_a_busy_actor_is_not_dead_but_a_stall_ends(
    make_actor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = make_actor()
    busy.work.remote(30)
    start = time.monotonic()
    watchdog, codes = watch({"training worker 1": busy}, lambda: time.monotonic() < start + 1.5, stall_s=1.0)
    time.sleep(1.0)
    assert codes == []
    watchdog.join(15)
    assert codes == [EXIT_CODE]
    err = capsys.readouterr().err
    assert "nothing has moved for 1 s; still busy: training worker 1; resume from" in err


def test_the_heartbeat_of_a_server_counts_as_progress(make_actor: Any) -> None:
    class Server:
        def heartbeat(self) -> float:
            return time.monotonic()

    watchdog, codes = watch({"rollout server": make_actor(Server)}, lambda: "stands", stall_s=1.0)
    time.sleep(2.5)
    assert watchdog.is_alive() and codes == []
    watchdog.stop()
    watchdog.join(5)
    assert codes == []


class FakeTrainer:
    """The parts of verl's trainer that the mixin touches."""

    trainer_mode = "sync"

    def __init__(self, folder: Path, fail: str = "") -> None:
        self.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder)}})
        self.fail, self.calls = fail, []  # type: ignore[var-annotated]
        self.replay_buffer = self._build_replay_buffer()

    def _build_replay_buffer(self) -> Any:
        parts = {
            name: defaultdict(set) for name in ("partitions", "pending_keys", "running_keys", "finished_keys")
        }
        return SimpleNamespace(poll_interval=2.0, filter_groups_metric="acc", **parts)

    def init(self) -> None:
        self.calls.append("init")
        if self.fail == "init":
            raise RuntimeError("init")

    def fit(self, agent_loop_manager: Any) -> None:
        self.calls.append(agent_loop_manager)
        assert any(thread.name == "pods-watchdog" for thread in threading.enumerate())
        if self.fail == "fit":
            raise RuntimeError("fit")


class FakeEmbedded(EmbeddedTrainerMixin, FakeTrainer):
    pass


def test_fast_polling_and_a_watchdog_for_as_long_as_the_run(ray_cluster: None, tmp_path: Path) -> None:
    trainer = FakeEmbedded(tmp_path)
    assert trainer.replay_buffer.poll_interval == POLL_INTERVAL_S
    assert trainer.replay_buffer.filter_groups_metric == "acc"
    trainer.init()
    trainer.fit("manager")
    assert trainer.calls == ["init", "manager"]
    for fail in ("init", "fit"):
        trainer = FakeEmbedded(tmp_path, fail=fail)
        with pytest.raises(RuntimeError, match=fail):
            trainer.init()
            trainer.fit("manager")
        assert trainer._watchdog is not None
        trainer._watchdog.join(5)
        assert not trainer._watchdog.is_alive()


def test_guard_the_poll_interval_is_an_attribute_that_verl_reads() -> None:
    import inspect

    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    assert inspect.signature(ReplayBuffer.__init__).parameters["poll_interval"].default == 2.0
    assert "time.sleep(self.poll_interval)" in inspect.getsource(ReplayBuffer._wait_for_next_poll)
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert "poll_interval" not in inspect.getsource(PPOTrainer)  # not to be configured


def test_put_over_every_registered_trainer_once() -> None:
    from verl.trainer.ppo.v1 import PPOTrainerSync
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    before = dict(TRAINER_REGISTRY)
    install_trainers()
    assert before == TRAINER_REGISTRY  # activate() has done it, on import
    assert set(TRAINER_REGISTRY) == {"sync", "colocate_async", "separate_async"}
    assert all(issubclass(cls, EmbeddedTrainerMixin) for cls in TRAINER_REGISTRY.values())
    assert issubclass(TRAINER_REGISTRY["sync"], PPOTrainerSync)

    # Another mixin, put over the entries before or after, keeps its place in the chain.
    class Other:
        pass

    try:
        TRAINER_REGISTRY["sync"] = type("OtherSync", (Other, PPOTrainerSync), {})
        install_trainers()
        assert [Other in cls.__mro__ for cls in (TRAINER_REGISTRY["sync"],)] == [True]
        assert TRAINER_REGISTRY["sync"].__mro__.index(EmbeddedTrainerMixin) == 1
    finally:
        TRAINER_REGISTRY.update(before)


def test_actors_of_a_trainer() -> None:
    from verl.experimental.agent_loop import AgentLoopManager
    from verl.experimental.reward_loop import RewardLoopManager
    from verl.single_controller.ray import RayWorkerGroup
    from verl.workers.rollout.llm_server import LLMServerManager

    def bare(cls: type, **attributes: Any) -> Any:
        instance = object.__new__(cls)
        instance.__dict__.update(attributes)
        return instance

    replica = SimpleNamespace(servers=["server"], server_address="hf_server_0")
    trainer = SimpleNamespace(
        actor_rollout_wg=bare(RayWorkerGroup, _workers=["w0", "w1"]),
        ref_policy_wg=bare(RayWorkerGroup, _workers=["w0", "w1"]),
        llm_server_manager=bare(LLMServerManager, rollout_replicas=[replica], global_load_balancer="lb"),
        agent_loop_manager=bare(AgentLoopManager, agent_loop_workers=["a"]),
        reward_loop_manager=bare(RewardLoopManager, reward_loop_workers=["r"]),
        teacher_model_manager=None,
        config=OmegaConf.create({}),
    )
    assert actors_of(trainer) == {
        "training worker 0 (actor_rollout)": "w0",
        "training worker 1 (actor_rollout)": "w1",
        "rollout server hf_server_0": "server",
        "load balancer (llm_server_manager)": "lb",
        "agent loop worker 0": "a",
        "reward worker 0": "r",
    }
    assert actors_of(SimpleNamespace(llm_server_manager=bare(LLMServerManager))) == {}  # while it is built


def test_progress(tmp_path: Path) -> None:
    trainer: Any = FakeTrainer(tmp_path)
    states = [progress_of(trainer)]
    trainer.global_steps = 1
    states.append(progress_of(trainer))
    trainer.timing_raw = {"gen": 1.0}
    states.append(progress_of(trainer))
    trainer.replay_buffer.finished_keys["train"].add("uid")
    states.append(progress_of(trainer))
    assert len(set(states)) == 4 and progress_of(trainer) == states[-1]


def test_last_checkpoint(tmp_path: Path) -> None:
    assert last_checkpoint(str(tmp_path / "none")) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "global_step_20")
