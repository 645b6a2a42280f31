"""How an environment of another package is found: by `module:id`, or by an entry point in every process."""

import os
import subprocess
import sys
import textwrap

import gymnasium
import pods_envs
import pytest
from pods_envs import registration

MODULE = """
import gymnasium
from pods_envs import Problem, ReasoningEnv, Verdict

def verify(response, problem):
    correct = response.strip() == problem.answer
    return Verdict(float(correct), correct, response.strip() or None, "exact", format_ok=True)

class Echo(ReasoningEnv):
    def __init__(self, *, split="train", **kwargs):
        super().__init__([Problem(f"Say {split} {i}.", f"{split} {i}") for i in range(5)], verify, **kwargs)

gymnasium.register("%s/Echo-v0", entry_point=Echo)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes installed packages: `package(name, code, entry point)`; returns the folder they are in."""

    def make(name, code, value=None):
        (tmp_path / f"{name}.py").write_text(code)
        if value is not None:
            info = tmp_path / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[pods.envs]\n{name} = {value}\n")
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.startswith("pods_test_")]:
        del sys.modules[name]


def python(script, *folders):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment
    )


def test_entry_points_are_loaded_by_import_in_any_process(package):
    folder = package("pods_test_found", MODULE % "found", "pods_test_found")
    script = """
        import multiprocessing, sys
        import gymnasium
        import pods_envs
        def ask(queue):
            env = gymnasium.make("found/Echo-v0")
            queue.put(env.reset(options={"index": 2})[0])
        if __name__ == "__main__":
            assert pods_envs.env_class("found/Echo-v0")[0].__name__ == "Echo"
            envs = gymnasium.make_vec("found/Echo-v0", num_envs=2, vectorization_mode="async")
            print(*envs.reset(options={"index": 1})[0])
            envs.close()
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=ask, args=(queue,))
                process.start()
                print(queue.get(timeout=60))
                process.join()
    """
    (folder / "main.py").write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(folder / "main.py")], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines() == [
        "Say train 1. Say train 1.",
        "Say train 2.",
        "Say train 2.",
    ], done.stderr


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("raise RuntimeError('no such\\nlibrary')", "pods_test_bad", "RuntimeError: no such library"),
        ("import sys; sys.exit(3)", "pods_test_bad", "SystemExit: 3"),
        ("", "pods_test_absent", "No module named 'pods_test_absent'"),
        ("", "pods_test_bad:register", "expected a module without ':register'"),
    ],
)
def test_a_broken_entry_point_is_one_line_and_breaks_nothing_else(package, code, value, reason):
    package("pods_test_bad", code, value)
    folder = package("pods_test_good", MODULE % "good", "pods_test_good")
    done = python(
        """
        import gymnasium, pods_envs
        print(gymnasium.make("good/Echo-v0").reset(options={"index": 0})[0])
        print(gymnasium.make("pods/Arithmetic-v0").reset(seed=0)[0])
        """,
        folder,
    )
    assert done.returncode == 0 and done.stdout.startswith("Say train 0.\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "package pods_test_bad" in line and repr(value) in line and reason in line, line


def test_a_package_that_imports_us_first_is_not_imported_twice(package):
    folder = package("pods_test_first", "import pods_envs\n" + MODULE % "first", "pods_test_first")
    done = python(
        "import pods_test_first, gymnasium; print(gymnasium.make('first/Echo-v0').reset(seed=0)[0])", folder
    )
    assert done.stdout.startswith("Say train") and done.stderr == "", done.stderr


def test_module_id_is_found_without_an_entry_point(package):
    package("pods_test_module", MODULE % "module")
    env_id = "pods_test_module:module/Echo-v0"
    assert pods_envs.env_spec(env_id).id == "module/Echo-v0"
    assert pods_envs.env_class(env_id)[0].__name__ == "Echo"
    assert gymnasium.make(env_id, split="test").reset(options={"index": 3})[0] == "Say test 3."


def test_an_unknown_id_says_what_to_write():
    with pytest.raises(
        gymnasium.error.NamespaceNotFound, match=r"found as module:nobody/X-v0, or by an entry"
    ):
        pods_envs.env_class("nobody/X-v0")
    with pytest.raises(gymnasium.error.NameNotFound, match="Did you mean: `Arithmetic`"):
        pods_envs.env_class("pods/Arithmetics-v0")
    with pytest.raises(ModuleNotFoundError, match=r"install its package.*or put its folder into PYTHONPATH"):
        pods_envs.env_class("pods_test_nothing:X-v0")


def test_ids_of_gymnasium_mean_what_they_did():
    """Our pattern lets a namespace hold slashes and changes nothing else."""
    ours, parse = registration.registration.ENV_ID_RE, registration.registration.parse_env_id
    assert parse("pods/reasoning-gym/leg_counting-v0") == ("pods/reasoning-gym", "leg_counting", 0)
    for env_id, parsed in {
        "CartPole-v1": (None, "CartPole", 1),
        "ALE/Pong-v5": ("ALE", "Pong", 5),
        "CartPole": (None, "CartPole", None),
        "a:b/C-d.e-v10": ("a:b", "C-d.e", 10),
    }.items():
        assert parse(env_id) == parsed
    for malformed in ("/X-v0", "a//X-v0", "a/", "a b-v0", ""):
        assert ours.fullmatch(malformed) is None
