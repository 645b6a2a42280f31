"""`pods plan`: what a recipe needs and costs on GPUs that nobody has to have."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from pods_plugin.cli.compose import LaunchError, compose
from pods_plugin.downsampling import DownsampleError
from pods_plugin.integration.checks import parse
from pods_plugin.planning.calibrate import Calibration, calibrate
from pods_plugin.planning.choose import Setting, Situation
from pods_plugin.planning.errors import PlanError
from pods_plugin.planning.figure import draw_plan
from pods_plugin.planning.gpus import GIB, GPU, find_gpu
from pods_plugin.planning.job import Job, job_from_config
from pods_plugin.planning.memory import MemoryPlan, advice, memory_plan
from pods_plugin.planning.model import find_model
from pods_plugin.planning.signal import PassRates
from pods_plugin.planning.steptime import DEFAULT, PHASES, assumed_lengths
from pods_plugin.reporting.runs import CONFIG_FILE, load_run

_RUN_DIR = "plan"  # of a run that is not made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command line; see `pods plan --help`."""

    recipe: str | None
    overrides: Sequence[str]
    config_dir: Path | None = None
    config_name: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    model: str | None = None
    calibrate: Path | None = None
    pass_rates: str | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    plot: Path | None = None
    json: bool = False


def plan(options: Options, console: Console) -> int:
    """Prints the plan.

    Returns:
        0; 1 if the run does not fit.

    Raises:
        LaunchError: The recipe does not exist or does not compose, or the plan cannot be made; one line.
    """
    try:
        return _plan(options, console)
    except (PlanError, DownsampleError) as error:
        raise LaunchError(" ".join(str(error).split())) from None


def _plan(options: Options, console: Console) -> int:
    folder, name = find_recipe(options)
    config = compose(folder, name, [*options.overrides, f"run_dir={_RUN_DIR}", f"run_name='{name}'"])
    gpu = find_gpu(options.gpu or ("cpu" if config.trainer.device == "cpu" else "h100"))
    calibration = None
    if options.calibrate:
        calibration, model = _calibrate(options, config, name, gpu)
        if options.model is None and str(config.actor_rollout_ref.model.path).startswith(f"{_RUN_DIR}/"):
            options = dataclasses.replace(
                options, model=model
            )  # the recipe makes its model in the run folder
    job = _job(config, options, name, options.gpus)

    given = PassRates.parse(options.pass_rates) if options.pass_rates else None
    for flag, value in (
        ("--prompt-tokens", options.prompt_tokens),
        ("--response-tokens", options.response_tokens),
    ):
        if value is not None and value <= 0:
            raise PlanError(f"{flag} {value:g}: expected a mean number of tokens above 0")
    if calibration and options.prompt_tokens is None and options.response_tokens is None:
        lengths = calibration.lengths
    else:
        lengths = assumed_lengths(job, options.prompt_tokens, options.response_tokens)
    situation = Situation(
        job,
        gpu,
        lengths,
        calibration.efficiencies if calibration else DEFAULT,
        given or (calibration.rates if calibration and calibration.rates else None) or PassRates(),
    )
    memory = memory_plan(job, gpu)
    changes = advice(job, gpu)
    if options.plot:
        draw_plan(situation, options.plot, f"{name} on {job.gpus} x {gpu.name}")
    if options.json:
        report = as_json(situation, memory, changes, calibration)
        print(json.dumps(report, indent=2))
    else:
        _print(console, situation, memory, changes, calibration)
        if options.plot:
            console.print(f"figure: {options.plot}", highlight=False)
    return 0 if memory.fits else 1


# --- the recipe ------------------------------------------------------------------------------------------------------


def find_recipe(options: Options) -> tuple[Path | None, str]:
    """The folder and name of the recipe: by --config-dir and --config-name, by path, or by name under recipes/.

    Raises:
        LaunchError: There is none, or more than one of that name.
    """
    if options.config_name is not None:
        if options.recipe is not None:
            raise LaunchError(
                f"both {options.recipe} and --config-name {options.config_name} are given; write one"
            )
        return options.config_dir, options.config_name
    if options.recipe is None:
        raise LaunchError("which recipe? write pods plan RECIPE, or --config-dir DIR --config-name NAME")
    path = Path(options.recipe)
    for file in (path, path.with_name(f"{path.name}.yaml")):
        if file.is_file() and file.suffix == ".yaml":
            return file.parent, file.stem
    for root in (options.config_dir or Path("recipes"), Path(__file__).resolve().parents[2] / "recipes"):
        known = {
            str(file.relative_to(root).with_suffix("")): file
            for file in sorted(root.glob("**/*.yaml"))
            if not file.parent.name.startswith("_")
        }
        if known:
            break
    wanted = options.recipe.removesuffix(".yaml").removeprefix("recipes/")
    found = [name for name in known if wanted in (name, Path(name).name)]
    if len(found) > 1:
        raise LaunchError(f"{wanted} is the name of {len(found)} recipes; write {' or '.join(found)}")
    if not found:
        names = [*known, *(Path(name).name for name in known)]
        near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
        hint = f"; nearest: {near[0]}" if near else f"; there: {', '.join(known) or 'none'}"
        raise LaunchError(f"there is no recipe {wanted} under {root}{hint}")
    return known[found[0]].parent, known[found[0]].stem


def _job(config: DictConfig, options: Options, name: str, gpus: int | None) -> Job:
    model = find_model(options.model or str(config.actor_rollout_ref.model.path))
    settings = parse(config)
    return job_from_config(config, model, name, keep=settings.keep if settings else None, gpus=gpus)


def _calibrate(options: Options, config: DictConfig, name: str, gpu: GPU) -> tuple[Calibration, str]:
    """Fits to a run, whose model is returned too.

    A run that `pods train` made has its config beside its metrics; any other is taken to be the recipe's.
    """
    path = options.calibrate
    assert path is not None
    try:
        run = load_run(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise PlanError(f"--calibrate {path}: {error}") from None
    own = (path if path.is_dir() else path.parent) / CONFIG_FILE
    if own.is_file():
        loaded = OmegaConf.load(own)
        assert isinstance(loaded, DictConfig)
        config = loaded
    model = options.model or str(config.actor_rollout_ref.model.path)
    moved = own.parent / Path(model).name  # the folder may have been copied from the cluster
    if not Path(model).is_dir() and (moved / "config.json").is_file():
        model = str(moved)
    job = _job(config, dataclasses.replace(options, model=model), name, None)
    return calibrate(run.steps, job, gpu), model


# --- output ----------------------------------------------------------------------------------------------------------


def as_json(
    situation: Situation, memory: MemoryPlan, changes: list[str], calibration: Calibration | None
) -> dict[str, Any]:
    """The plan as plain data; sizes in GiB."""
    job = situation.job
    best = situation.best(job.m)

    def row(setting: Setting) -> dict[str, Any]:
        return {**dataclasses.asdict(setting), "name": setting.name}

    def gib(parts: dict[str, float]) -> dict[str, float]:
        return {part: size / GIB for part, size in parts.items()}

    report: dict[str, Any] = {
        "recipe": job.name,
        "model": {
            "name": job.model.name,
            "parameters": job.model.parameters,
            "active_parameters": job.model.active_parameters,
        },
        "gpu": situation.gpu.name,
        "gpus": job.gpus,
        "n": job.n,
        "m": job.m,
        "memory_gib": {
            "generate": gib(memory.generate),
            "update": gib(memory.update),
            "limit": memory.limit and memory.limit / GIB,
        },
        "kv_tokens": memory.kv_tokens if memory.limit is not None else None,
        "fits": memory.fits,
        "problems": list(memory.problems),
        "write": changes,
        "lengths": dataclasses.asdict(situation.lengths),
        "efficiencies": dataclasses.asdict(situation.efficiencies),
        "pass_rates": str(situation.rates),
        "settings": [row(setting) for setting in situation.compared()],
        "best_n": row(best),
        "best": [row(setting) for setting in situation.best_of_all()],
    }
    if calibration:
        report["calibration"] = {"steps": calibration.steps, "errors": calibration.errors}
    return report


def _print(
    console: Console,
    situation: Situation,
    memory: MemoryPlan,
    changes: list[str],
    calibration: Calibration | None,
) -> None:
    job, gpu = situation.job, situation.gpu
    count = job.model.parameters
    size = f"{count / 1e9:.2f}B parameters" if count >= 1e8 else f"{count / 1e6:.2g}M parameters"
    if job.model.experts:
        size += f", {job.model.active_parameters / 1e9:.1f}B active"
    console.print(
        f"[bold]{job.name}[/bold] on {job.gpus} x {gpu.name}: {job.model.name} ({size}), {job.trainer.backend}, "
        f"{job.prompts} prompts x {job.n} rollouts" + (f", {job.m} kept" if job.m < job.n else ""),
        highlight=False,
    )
    _print_memory(console, memory, changes)
    lengths = situation.lengths
    whose = "of the run" if calibration else "assumed"
    console.print(
        f"\nSeconds a step, for prompts of {lengths.prompt:.0f} and responses of {lengths.response:.0f} tokens "
        f"(longest {lengths.longest:.0f}; {whose}), pass rates {situation.rates}:",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for title in ("generate", "log-prob", "ref.", "update", "other", "step", "variance", "signal/s"):
        table.add_column(title, justify="right", no_wrap=True)
    settings = situation.compared()
    for setting in settings:
        cells = [f"{setting.seconds[phase]:.1f}" for phase in (*PHASES, "step")]
        relative = setting.rate / settings[0].rate if settings[0].rate else 0.0
        table.add_row(setting.name, *cells, f"{setting.variance:.3f}", f"x {relative:.2f}")
    console.print(table)
    best = situation.best(job.m)
    of = (
        f"x {best.rate / settings[0].rate:.2f} of GRPO n={job.m}" if settings[0].rate else "no prompt has any"
    )
    console.print(f"Most variance a second with m={job.m}: n={best.n} ({of})", highlight=False)
    if calibration:
        _print_calibration(console, situation, calibration)
    else:
        console.print(
            "[dim]Predicted from data sheets and stated efficiencies (docs/planning.md); --calibrate METRICS.jsonl "
            "fits them to a run on your cluster.[/dim]",
            highlight=False,
        )


def _print_memory(console: Console, memory: MemoryPlan, changes: list[str]) -> None:
    if memory.limit is None:
        console.print("Memory: not judged on a CPU")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("GiB a GPU", "generating", "updating"):
        table.add_column(title, justify="left" if title == "GiB a GPU" else "right")
    for part in dict.fromkeys([*memory.update, *memory.generate]):
        table.add_row(
            part, *(f"{p[part] / GIB:.1f}" if part in p else "" for p in (memory.generate, memory.update))
        )
    totals = (sum(memory.generate.values()), sum(memory.update.values()))
    table.add_row("[bold]together[/bold]", *(f"[bold]{total / GIB:.1f}[/bold]" for total in totals))
    console.print(table)
    if memory.fits:
        console.print(
            f"[bold green]fits[/bold green] in {memory.limit / GIB:.1f} GiB (95% of the GPU)", highlight=False
        )
    else:
        problems = "; ".join(memory.problems)
        write = " ".join(changes) if changes else "no change known here is enough: take larger GPUs"
        console.print(
            f"[bold red]does not fit[/bold red]: {problems}; write: {write}", highlight=False, soft_wrap=True
        )


def _print_calibration(console: Console, situation: Situation, calibration: Calibration) -> None:
    e = situation.efficiencies
    console.print(f"\nFitted to {calibration.steps} steps (deviation of the median step in brackets):")
    for phase in ("generate", "log-prob", "update"):
        name = phase.replace("-", "_")
        if phase in calibration.errors:
            console.print(
                f"  {phase}: {getattr(e, f'fixed_{name}'):.2f} s + roofline / {getattr(e, name):.3g} "
                f"({100 * calibration.errors[phase]:.0f}%)",
                highlight=False,
            )
    console.print("On this cluster, most signal a second:")
    for setting in situation.best_of_all():
        text = (
            f"algorithm.downsample_kwargs.keep={setting.m}"
            if setting.n > setting.m
            else "algorithm.downsample=null"
        )
        console.print(
            f"  n={setting.n:<4} m={setting.m:<4} {setting.seconds['step']:.1f} s a step, "
            f"x {setting.rate / situation.compared()[-1].rate:.2f} of this recipe: "
            f"actor_rollout_ref.rollout.n={setting.n} {text}",
            highlight=False,
            soft_wrap=True,
        )
