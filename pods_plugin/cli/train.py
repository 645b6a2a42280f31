"""`pods train`: compose, check, prepare, run verl in a child process, and show one line a step."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pods_plugin.cli.compose import LaunchError, compose, one_line
from pods_plugin.downsampling import DownsampleConfig, DownsampleError
from pods_plugin.reporting.console import StepConsole
from pods_plugin.reporting.figures import learning_curve
from pods_plugin.reporting.runs import MetricsTail, load_run
from pods_plugin.reporting.summary import print_summary, summarise

GRACE_S = 3.0  # that the driver has to end by itself before its processes are killed
RUN_ID = "PODS_RUN_ID"  # environment variable that marks every process of a run


def train(
    config_dir: Path | None,
    config_name: str,
    overrides: Sequence[str],
    *,
    name: str | None,
    runs_dir: Path,
    resume: Path | None,
    dry_run: bool,
    console: Console,
) -> int:
    """Runs a recipe; see `pods train --help`.

    Returns:
        The exit code: 0 done, 1 failed, 130 interrupted.

    Raises:
        LaunchError: The run cannot start.
    """
    for override in overrides:
        if override.lstrip("+~").split("=", 1)[0] in ("run_dir", "run_name"):
            raise LaunchError(f"{override}: the run's folder is named by the options --runs-dir and --name")
    if resume is not None:
        if not (resume / "config.yaml").is_file():
            raise LaunchError(
                f"--resume {resume}: no config.yaml there; expected a folder that pods train made"
            )
        run_dir = resume.resolve()
        config = compose(run_dir, "config", [*overrides, f"run_dir='{run_dir}'"], strict=False)
    else:
        run_name = name or Path(config_name).name.removesuffix(".yaml")
        run_dir = _free_folder(runs_dir, run_name, exact=name is not None)
        config = compose(
            config_dir, config_name, [*overrides, f"run_dir='{run_dir}'", f"run_name='{run_dir.name}'"]
        )
    _absolute_data_paths(config)
    settings = _check(config)
    embedded = config.trainer.device == "cpu"
    _describe(console, config, settings, run_dir)

    with tempfile.TemporaryDirectory(prefix="pods-", ignore_cleanup_errors=True) as temp:
        _check_files(config, run_dir, prepared=False)
        if dry_run:
            config.run_dir = temp  # a dry run leaves nothing behind
            OmegaConf.save(config, Path(temp) / "config.yaml")
            _verl_check(Path(temp), _environment(config, Path(temp), Path(temp)))
            console.print("dry run: the config composes, verl and verl-pods accept it; nothing was started")
            return 0
        run_dir.mkdir(parents=True, exist_ok=True)
        _prepare(config, run_dir, console)
        _check_files(config, run_dir, prepared=True)
        environment = _environment(config, run_dir, Path(temp) if embedded else None)
        if embedded:
            config = OmegaConf.merge(config, {"ray_kwargs": {"ray_init": {"_temp_dir": temp}}})  # type: ignore[assignment]
        else:
            # Loggers run in an actor of verl, on whatever node Ray puts it: only a local Ray inherits from us.
            variables = {key: environment[key] for key in _logger_paths(run_dir)}
            runtime = {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": variables}}}}
            config = OmegaConf.merge(config, runtime)  # type: ignore[assignment]
        OmegaConf.save(config, run_dir / "config.yaml")
        _keep_earlier_metrics(run_dir)
        if resume is None:
            launch = {
                "config_dir": config_dir and str(config_dir),
                "config_name": config_name,
                "overrides": [*overrides],
            }
            (run_dir / "launch.json").write_text(json.dumps(launch, indent=2) + "\n")
        code = _watch(config, settings, run_dir, environment, console)
    if code != 130:  # who interrupts does not want to wait for a figure
        _report(config, run_dir, console, finished=code == 0)
    return code


# --- before anything starts ------------------------------------------------------------------------------------------


def _free_folder(runs_dir: Path, name: str, *, exact: bool) -> Path:
    folder = runs_dir.resolve() / name
    if exact and folder.exists():
        raise LaunchError(
            f"--name {name}: {folder} is there already; continue it with --resume {folder}, or give another name"
        )
    number = 2
    while folder.exists():
        folder = runs_dir.resolve() / f"{name}-{number}"
        number += 1
    return folder


def _check(config: DictConfig) -> DownsampleConfig | None:
    # checks.py needs omegaconf only, not verl
    from pods_plugin.integration.checks import check_config
    from pods_plugin.integration.model_checks import ModelError, check_model

    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "pods" not in [part.strip() for part in policy.split(",")]:
        raise LaunchError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading verl-pods; unset it or add pods to it"
        )
    if not entry_points(group="verl.plugins", name="pods"):
        raise LaunchError(
            "verl-pods is not installed, only on the path: pip install -e . (workers load it by name)"
        )
    try:
        settings = check_config(config)
        check_model(config)
    except (DownsampleError, ModelError) as error:
        raise LaunchError(str(error)) from None
    except OmegaConfBaseException as error:
        raise LaunchError(one_line(error)) from None
    return settings


def _verl_check(folder: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pods_plugin.cli.driver", str(folder / "config.yaml"), "--check"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LaunchError(explain(result.stdout + result.stderr))


def _check_files(config: DictConfig, run_dir: Path, *, prepared: bool) -> None:
    """Looks for what the run will read; before the recipe's `prepare` steps, only for what these do not make."""

    def made(path: str) -> bool:
        return not prepared and Path(path).is_relative_to(run_dir)

    for split in ("train", "val"):
        value = OmegaConf.select(config, f"data.{split}_files")
        for path in value if isinstance(value, ListConfig) else [value]:
            if path is None or "://" in str(path) or made(str(path)):
                continue
            if not Path(str(path)).expanduser().exists():
                env_id = OmegaConf.select(config, f"env_ids.{split}")
                command = f"{env_id} --out {_shown(Path(str(path)).parent)}" if env_id else "ENV_ID --out DIR"
                only = f" --split {Path(str(path)).stem}" if env_id else ""
                raise LaunchError(
                    f"data.{split}_files={_shown(path)} does not exist; write it with: pods data {command}{only}"
                )
    model = str(config.actor_rollout_ref.model.path)
    if (
        model.startswith(("/", "./", "../", "~"))
        and not made(model)
        and not Path(model).expanduser().is_dir()
    ):
        raise LaunchError(
            f"actor_rollout_ref.model.path={model} is no folder; give a Hugging Face folder or a name on the hub"
        )


def _absolute_data_paths(config: DictConfig) -> None:
    """Paths of data as they are seen from here: workers have a working directory of their own."""
    for key in ("train_files", "val_files"):
        value = config.data[key]
        if config.data._get_node(key)._is_interpolation():  # of the run folder, which may be moved
            continue
        paths = [
            path if path is None or "://" in str(path) else str(Path(str(path)).expanduser().absolute())
            for path in (value if isinstance(value, ListConfig) else [value])
        ]
        config.data[key] = paths if isinstance(value, ListConfig) else paths[0]


def _prepare(config: DictConfig, run_dir: Path, console: Console) -> None:
    """Runs the recipe's `prepare` steps that this run folder does not have yet."""
    from hydra.utils import instantiate

    done_path = run_dir / "prepared.json"
    done = json.loads(done_path.read_text()) if done_path.is_file() else {}
    for step in config.get("prepare") or {}:
        spec = OmegaConf.to_container(config.prepare[step], resolve=True)
        if done.get(step) == spec:
            continue
        start = time.monotonic()
        console.print(f"prepare {step} ...")
        try:
            instantiate(spec, _convert_="all")
        except Exception as error:
            cause = error.__cause__ or error  # Hydra wraps the step's own error
            raise LaunchError(f"prepare.{step}: {one_line(cause)}") from error
        console.print(f"prepare {step}: {time.monotonic() - start:.1f} s")
        done[step] = spec
        done_path.write_text(json.dumps(done, indent=2) + "\n")


def _describe(console: Console, config: DictConfig, settings: DownsampleConfig | None, run_dir: Path) -> None:
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    if settings is None:
        what = f"{prompts} prompts x {n} rollouts a step, all trained on (algorithm.downsample=null)"
    else:
        what = (
            f"{prompts} prompts x {n} rollouts a step, {settings.keep} of each kept by {settings.rule}: "
            f"{prompts * n} generated, {prompts * settings.keep} trained on"
        )
    console.print(f"[bold]{run_dir.name}[/bold]: {what}", highlight=False)


def _keep_earlier_metrics(run_dir: Path) -> None:
    """verl's file logger overwrites its file: what an earlier part of this run wrote is moved aside."""
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        part = 1
        while (run_dir / f"metrics.part{part}.jsonl").exists():
            part += 1
        metrics.rename(run_dir / f"metrics.part{part}.jsonl")


def _logger_paths(run_dir: Path) -> dict[str, str]:
    """Where verl's loggers write, by the environment variables that they read."""
    return {
        "VERL_FILE_LOGGER_PATH": str(run_dir / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "WANDB_DIR": str(run_dir),
    }


def _environment(config: DictConfig, run_dir: Path, temp: Path | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        {
            RUN_ID: uuid.uuid4().hex,
            "PYTHONUNBUFFERED": "1",
            "HYDRA_FULL_ERROR": "1",
        }
    )
    for variable, path in _logger_paths(run_dir).items():
        environment.setdefault(variable, path)
    # Ours in any case: the lines on the screen, the curve and the summary are made of this file.
    environment["VERL_FILE_LOGGER_PATH"] = _logger_paths(run_dir)["VERL_FILE_LOGGER_PATH"]
    if config.trainer.device == "cpu":
        from pods_plugin.cpu import ENVIRONMENT

        environment.update(ENVIRONMENT)
        for variable, key in (("PODS_CPU_THREADS", "threads"), ("PODS_CPU_TIMEOUT_S", "timeout_s")):
            value = OmegaConf.select(config, f"embedded.{key}")
            if value is not None:
                environment[variable] = str(value)
        # Ray asks for a token; one of the run's own, so that neither another run nor ~/.ray comes into it.
        environment.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        environment.pop("RAY_ADDRESS", None)  # a run of its own, whatever cluster this shell points at
    if temp is not None:
        # Caches of the run, not of the user: two runs do not meet, and nothing is left behind.
        for variable in ("TMPDIR", "HF_DATASETS_CACHE", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
            environment[variable] = str(temp)
    return environment


# --- the run ---------------------------------------------------------------------------------------------------------


def _watch(
    config: DictConfig,
    settings: DownsampleConfig | None,
    run_dir: Path,
    environment: dict[str, str],
    console: Console,
) -> int:
    log_path = run_dir / "train.log"
    start_step = max((record.step for record in load_run(run_dir).steps), default=0)
    total = _total_steps(config)
    lines = StepConsole(console, total_steps=total, start_step=start_step)
    tail = MetricsTail(run_dir / "metrics.jsonl")
    console.print(f"verl's log: {_shown(log_path)}", highlight=False)
    console.print("starting Ray and verl ...")
    command = [sys.executable, "-m", "pods_plugin.cli.driver", str(run_dir / "config.yaml")]
    offset = log_path.stat().st_size if log_path.exists() else 0
    with log_path.open("ab") as log, _terminate_as_interrupt():
        # A session of its own: Ctrl-C reaches this process alone, which then ends the run in order.
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        interrupted = False
        try:
            while child.poll() is None:
                for record in tail.read():
                    lines.add(record)
                time.sleep(0.2)
        except KeyboardInterrupt:
            console.print("\nstopping ...")
            interrupted = True
        finally:
            _end(child, environment[RUN_ID])
    if interrupted:
        console.print(f"interrupted; {_resume_hint(config, run_dir)}", highlight=False)
        return 130
    for record in tail.read():
        lines.add(record)
    if child.returncode:
        text = log_path.read_bytes()[offset:].decode(errors="replace")
        console.print(f"[bold red]failed[/bold red]: {explain(text)}", highlight=False, soft_wrap=True)
        console.print(
            f"the whole story: {_shown(log_path)}; {_resume_hint(config, run_dir)}", highlight=False
        )
        return 1
    return 0


def _total_steps(config: DictConfig) -> int:
    """The step a run ends at, as verl reckons it (overlong prompts that verl filters out are counted here)."""
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    from pyarrow.parquet import read_metadata

    files = config.data.train_files
    rows = sum(read_metadata(path).num_rows for path in (files if isinstance(files, ListConfig) else [files]))
    return int(rows // config.data.train_batch_size * config.trainer.total_epochs)


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a scheduler, `kill`) ends a run like Ctrl-C does."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes], run_id: str) -> None:
    """Ends the driver and every process of the run, and removes the shared memory they may leave."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not break the cleaning up
    try:
        processes = _processes(run_id)
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        processes |= _processes(run_id)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=3.0)
        pids = {str(process.pid) for process in processes}
        shared = Path("/dev/shm")
        for path in shared.iterdir() if shared.is_dir() else ():
            if pids & set(re.findall(r"\d+", path.name)):  # torch_PID_..., sem.mp-...
                path.unlink(missing_ok=True)
    finally:
        signal.signal(signal.SIGINT, before)


def _processes(run_id: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_ID) == run_id:
                found.add(process)
        except psutil.Error:
            continue
    return found


# --- afterwards ------------------------------------------------------------------------------------------------------


def explain(log: str) -> str:
    """The one line of a log that says why a run failed: ours if there is one, else the last error raised."""
    ours = re.findall(r"verl-pods: (.+)", log)
    if ours:
        return ours[-1]
    errors = re.findall(
        r"^(?:\([^)]*\) )?(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt)(?:\(\w+\))?: .+)$", log, re.M
    )
    errors = [line for line in errors if not line.startswith("RayTaskError")]
    if errors:
        return errors[-1].removeprefix("DownsampleError: ").removeprefix("LaunchError: ")
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "verl ended without a word"


def last_checkpoint(config: DictConfig) -> Path | None:
    """The newest complete checkpoint of a run; verl names it in a tracker file once it is written."""
    folder = Path(str(config.trainer.default_local_dir))
    tracker = folder / "latest_checkpointed_iteration.txt"
    return folder / f"global_step_{tracker.read_text().strip()}" if tracker.is_file() else None


def _resume_hint(config: DictConfig, run_dir: Path) -> str:
    checkpoint = last_checkpoint(config)
    if checkpoint is None:
        return "no checkpoint was written yet, start it again"
    return f"the last checkpoint is {_shown(checkpoint)}; go on with: pods train --resume {_shown(run_dir)}"


def _report(config: DictConfig, run_dir: Path, console: Console, *, finished: bool) -> None:
    run = load_run(run_dir)
    if not run.steps:
        return
    curve = learning_curve([run], run_dir / "curve.png")
    if not finished:
        return
    steps = 2 * run.steps[-1].step
    print_summary(
        console,
        summarise(run),
        run_dir=_shown(run_dir),
        checkpoint=(lambda path: path and _shown(path))(last_checkpoint(config)),
        curve=_shown(curve),
        resume_command=f"pods train --resume {_shown(run_dir)} trainer.total_training_steps={steps}",
        baseline_command=_baseline_command(config, run_dir),
    )


def _baseline_command(config: DictConfig, run_dir: Path) -> str | None:
    launch_path = run_dir / "launch.json"
    if config.algorithm.downsample is None or not launch_path.is_file():
        return None
    launch = json.loads(launch_path.read_text())
    folder = ["--config-dir", launch["config_dir"]] if launch["config_dir"] else []
    overrides = [word for word in launch["overrides"] if not word.startswith("algorithm.downsample=")]
    words = [
        "pods",
        "train",
        *folder,
        "--config-name",
        launch["config_name"],
        *overrides,
        "algorithm.downsample=null",
    ]
    return shlex.join(words)


def _shown(path: Path | str) -> str:
    """A path as a person would type it: relative where that is shorter."""
    path = Path(path)
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


__all__ = ["LaunchError", "explain", "last_checkpoint", "train"]
