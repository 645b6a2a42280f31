"""The tasks of reasoning-gym as environments. Skipped where the package is not installed."""

import asyncio
import importlib.util
import json
import pickle
import sys

import gymnasium
import pods_envs
import pytest
from gymnasium.utils.env_checker import check_env
from pods_envs.checking import FAILED, check_environment
from pods_envs.reasoning_gym import TASKS, ReasoningGymEnv

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: pip install 'verl-pods[reasoning-gym]'",
)
LEGS = "pods/reasoning-gym/leg_counting-v0"


@needs_package
def test_the_list_of_tasks_is_that_of_the_package():
    from reasoning_gym.factory import DATASETS

    assert set(TASKS) == set(DATASETS) - {"composite"}


@needs_package
def test_an_episode():
    env = gymnasium.make(LEGS, size=20)
    check_env(env.unwrapped)
    observation, info = env.reset(options={"index": 3})
    problem = env.unwrapped.problems[3]
    assert observation.startswith(problem.question) and "<answer>" in observation
    wrong = str(int(problem.answer) + 1)
    *_, info = env.step(f"<answer>{problem.answer}</answer> no: <answer>{wrong}</answer>")
    assert (info["correct"], info["extracted"]) == (False, wrong)  # the last one counts
    env.reset(options={"index": 3})
    _, reward, terminated, _, info = env.step(f"So <answer> {problem.answer}\n</answer>.")
    assert (reward, terminated, info["correct"], info["format_ok"]) == (1.0, True, True, True)
    env.reset(options={"index": 3})
    *_, info = env.step(f"It is {problem.answer}. <answer>{problem.answer}")
    assert (info["correct"], info["verdict"].method) == (False, "no_answer")


@needs_package
def test_the_scorer_gives_partial_credit():
    env = gymnasium.make("pods/reasoning-gym/letter_jumble-v0", size=5, format_weight=0.5).unwrapped
    problem = env.problems[0]
    score = _own_score("letter_jumble", env, problem, problem.answer[:-1] + "?")
    verdict = env.verify(f"<answer>{problem.answer[:-1]}?</answer>", problem)
    assert 0 < score < 1 and not verdict.correct
    assert verdict.reward == pytest.approx(0.5 * score + 0.5)


def _own_score(task, env, problem, answer):
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, **env.problems.settings)
    entry = dataset[env.problems.settings["size"] - len(env.problems)]
    assert entry["question"] == problem.question
    return dataset.score_answer(answer, entry)


@needs_package
def test_splits_and_seeds_are_different_problems_and_repeat():
    def questions(**kwargs):
        return [problem.question for problem in ReasoningGymEnv(task="chain_sum", size=50, **kwargs).problems]

    assert questions() == questions()
    assert not set(questions()) & set(questions(split="test"))
    assert not set(questions()) & set(questions(seed=1))
    with pytest.raises(ValueError, match="split='dev' is not 'train' or 'test'"):
        questions(split="dev")


@needs_package
def test_settings_of_the_task():
    env = gymnasium.make(LEGS, config={"min_animals": 2, "max_animals": 2}, size=3).unwrapped
    assert all("'num_animals': 2" in problem.info["metadata"] for problem in env.problems)
    copy = pickle.loads(pickle.dumps(env))
    assert list(copy.problems) == list(env.problems)
    with pytest.raises(ValueError, match=r"does not suit the task leg_counting.*its settings: min_animals"):
        gymnasium.make(LEGS, config={"animals": 2})


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(gymnasium.error.NameNotFound, match="Did you mean: `leg_counting`"):
        gymnasium.make("pods/reasoning-gym/leg_count-v0")


@needs_package
def test_a_task_of_another_version_names_the_nearest():
    with pytest.raises(ValueError, match="no task 'leg_countin'; nearest: leg_counting"):
        ReasoningGymEnv(task="leg_countin")


def test_without_the_package_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'verl-pods\[reasoning-gym\]'"):
        gymnasium.make(LEGS)


@needs_package
def test_a_scorer_that_evaluates_the_answer_cannot_harm_us():
    """Some scorers call eval: the answer runs in a process that is killed on time or memory."""
    env = gymnasium.make("pods/reasoning-gym/n_queens-v0", size=2).unwrapped
    problem = env.problems[0]
    for code, methods in (
        ("[9**9**9**9]", {"timeout"}),
        ("[[0] * 10**10]", {"memory", "unparsable", "exact"}),  # some scorers catch a MemoryError
        ("__import__('os')._exit(0)", {"error", "timeout"}),  # timeout: no worker was up in time
    ):
        verdict = env.verify(f"<answer>{code}</answer>", problem)
        assert verdict.method in methods and verdict.reward == 0, (code, verdict)
        assert env.verify(env.reference_response(problem), problem).correct


@needs_package
def test_all_checks_pass():
    failed = [finding for finding in check_environment(LEGS, {"size": 20}) if finding.status == FAILED]
    assert failed == []


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_reference_scores_itself_through_the_data_files(task):
    """As in a trainer: question, answer and info as JSON are all that the reward function gets."""
    env = gymnasium.make(f"pods/reasoning-gym/{task}-v0", size=5).unwrapped
    scorer = ReasoningGymEnv.for_verification(task=task, size=5)
    for problem in env.problems:
        row = pods_envs.Problem(problem.question, problem.answer, json.loads(problem.info_json()))
        verdict = asyncio.run(scorer.verify_async(env.reference_response(problem), row))
        assert verdict.correct or task in WITHOUT_REFERENCE, verdict
        assert not env.verify("<answer></answer>", problem).correct


WITHOUT_REFERENCE = {"boxnet", "rush_hour"}  # several answers are right and the task tells none
