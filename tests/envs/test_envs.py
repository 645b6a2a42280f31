"""Every registered environment through gymnasium's own checks."""

import pickle
import warnings

import gymnasium
import pods_envs  # noqa: F401
import pytest
from gymnasium.utils.env_checker import check_env
from pods_envs.registration import ENTRY_POINTS

# keywords that make an id independent of data files
OFFLINE = {
    env_id: {"source": "procedural", "size": 20} for env_id in ENTRY_POINTS if env_id != "pods/Arithmetic-v0"
}

each_env = pytest.mark.parametrize("env_id", sorted(ENTRY_POINTS))


def make(env_id, **kwargs):
    return gymnasium.make(env_id, **OFFLINE.get(env_id, {}), **kwargs)


@each_env
@pytest.mark.parametrize("max_turns", [1, 3])
def test_gymnasium_checker(env_id, max_turns):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make(env_id, max_turns=max_turns)
        check_env(env.unwrapped)
        observation, info = env.reset(options={"index": 0})
        assert observation == info["messages"][-1]["content"]
        env.step(env.action_space.sample())
        env.close()


@each_env
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec(env_id, mode):
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, **OFFLINE.get(env_id, {}))
    observations, _ = envs.reset(options={"index": 1})
    env = make(env_id).unwrapped
    assert observations == (env.messages(env.problems[1])[-1]["content"],) * 2
    _, rewards, terminated, truncated, info = envs.step(
        ("\ud800 no", env.reference_response(env.problems[1]))
    )
    assert list(terminated) == [True, True] and not any(truncated)
    assert list(rewards) == [0.0, 1.0] and list(info["correct"]) == [False, True]
    envs.close()


@each_env
def test_reset_is_reproducible(env_id):
    env = make(env_id)
    assert env.reset(seed=3) == env.reset(seed=3)
    assert env.reset(options={"index": 2})[1]["index"] == 2
    with pytest.raises(IndexError, match=r"not in 0\.\."):
        env.reset(options={"index": 10**9})


@each_env
def test_pickles(env_id):
    env = make(env_id).unwrapped
    copy = pickle.loads(pickle.dumps(env))
    assert list(copy.problems) == list(env.problems)


@each_env
def test_references_score_themselves(env_id):
    assert make(env_id).unwrapped.validate() == []


@each_env
def test_a_wrong_attempt_gets_feedback(env_id):
    env = make(env_id, max_turns=2, feedback="No. {turns_left} left.")
    env.reset(options={"index": 0})
    problem = env.unwrapped.problems[0]
    observation, reward, terminated, _, info = env.step("no idea")
    assert (observation, reward, terminated, info["correct"]) == ("No. 1 left.", 0.0, False, False)
    observation, reward, terminated, _, info = env.step(env.unwrapped.reference_response(problem))
    assert (observation, reward, terminated, info["correct"]) == ("", 1.0, True, True)
    assert info["reference"] == problem.answer and info["format_ok"] and info["verdict"].correct
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("again")
