"""From a recipe's name and overrides to verl's config."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf


class LaunchError(Exception):
    """A run that cannot start; its text is the one line that the user sees."""


OUR_CONFIGS = Path(__file__).resolve().parent.parent / "config"


def verl_configs() -> Path:
    """The folder of verl's Hydra configs, found without importing verl (which takes seconds).

    Raises:
        LaunchError: verl is absent or older than 0.9.
    """
    from importlib.metadata import PackageNotFoundError, version

    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise LaunchError(
            "verl is not installed here; on a cluster install verl 0.9.x as usual, without a GPU "
            'write: pip install "verl-pods[cpu]"'
        )
    try:
        found = version("verl")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        found = (Path(spec.submodule_search_locations[0]) / "version" / "version").read_text().strip()
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < (0, 9):
        raise LaunchError(
            f"verl {found} is installed, verl-pods needs 0.9 or newer: pip install 'verl>=0.9,<0.10'"
        )
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def compose(
    config_dir: Path | None, config_name: str, overrides: Sequence[str], *, strict: bool = True
) -> DictConfig:
    """Composes a recipe on top of verl's configs and ours.

    A recipe finds the folder `_base` beside its own folder as `/_base`. With `+cpu=shrink` the result is the recipe
    shrunk to a machine without a GPU, see pods_plugin/cpu/shrink.py.

    Args:
        config_dir: The folder of the recipe; None for the configs of verl-pods and verl themselves.
        config_name: Its name, with or without `.yaml`.
        overrides: Hydra overrides, as verl's command line takes them.
        strict: Refuse keys of the recipe that neither verl nor verl-pods has. `+key=value` on the command line
            adds a key all the same.

    Raises:
        LaunchError: The recipe does not exist, it has an unknown key, or an override does not fit; one line.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    search = [f"file://{OUR_CONFIGS}", f"file://{verl_configs()}"]
    folder = (config_dir or OUR_CONFIGS).resolve()
    if (folder.parent / "_base").is_dir():
        search.append(f"file://{folder.parent}")
    name = config_name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        there = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise LaunchError(f"there is no recipe {name}.yaml in {folder}; there: {there}")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = hydra_compose(name, [f"hydra.searchpath=[{','.join(search)}]", *overrides])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise LaunchError(f"{name}: {one_line(error)}{_nearest_key(error, folder, name, search)}") from error
    OmegaConf.set_struct(config, False)
    if strict:
        added = [word.lstrip("+").split("=")[0] for word in overrides if word.startswith("+")]
        _check_keys(config, name, added)
    if config.get("shrink") is not None:
        from pods_plugin.cpu.shrink import shrink
        from pods_plugin.integration.model_checks import model_facts

        try:
            config = shrink(config, model_facts(str(config.actor_rollout_ref.model.path)))
        except ValueError as error:
            raise LaunchError(f"{name}: {one_line(error)}") from error
    return config


def _check_keys(config: DictConfig, name: str, added: Sequence[str]) -> None:
    """Refuses keys that verl would not read: Hydra takes any key that a file brings."""
    from pods_plugin.cli.schema import unknown_key

    groups = tuple(group for group in ("embedded", "shrink") if group in config)
    schema = _schema(str(config.get("model_engine", "dp")), groups)
    found = unknown_key(config, schema, verl_configs().parents[1], added)
    if found is not None:
        key, nearest = found
        hint = f"; nearest: {nearest}" if nearest else ""
        raise LaunchError(f"{name}: {key} is no key of verl or verl-pods{hint}")


@functools.lru_cache(maxsize=8)
def _schema(model_engine: str, groups: tuple[str, ...]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    words = [f"hydra.searchpath=[file://{verl_configs()}]", f"model_engine={model_engine}"]
    with initialize_config_dir(str(OUR_CONFIGS), version_base=None):
        return hydra_compose("pods_trainer", [*words, *(f"+cpu={group}" for group in groups)])


def one_line(error: BaseException) -> str:
    """An error of Hydra or verl, whose messages are paragraphs, as one line of readable length."""
    text = " ".join(str(error).split()) or repr(error)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _nearest_key(error: BaseException, folder: Path, name: str, search: list[str]) -> str:
    """`; nearest: a.b.c` for an override whose key does not exist."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    match = re.search(r"Could not override '([^']+)'", str(error))
    if match is None:
        return ""
    with initialize_config_dir(str(folder), version_base=None):
        config = hydra_compose(name, [f"hydra.searchpath=[{','.join(search)}]"])
    near = difflib.get_close_matches(match[1], _keys(config), n=1, cutoff=0.7)
    return f"; nearest: {near[0]}" if near else ""


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in map(str, config):
        found.append(f"{prefix}{key}")
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            found += _keys(node, f"{prefix}{key}.")
    return found
