"""The recipes as the tests see them: every YAML file under recipes/, by listing the folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pods_plugin.cli.compose import compose

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes"
BASES = sorted((FOLDER / "_base").glob("*.yaml"))
RECIPES = sorted(set(FOLDER.rglob("*.yaml")) - set(BASES))
GPU_RECIPES = [path for path in RECIPES if path.parent.name != "cpu"]
FSDP_RECIPES = [path for path in GPU_RECIPES if path.parent.name == "fsdp"]


def name(path: Path) -> str:
    """A test id: `recipes/fsdp/...`."""
    return str(path.relative_to(ROOT).with_suffix(""))


def load(path: Path, *overrides: str, run_dir: Path = Path("run")) -> DictConfig:
    """A recipe, composed as `pods train` does."""
    return compose(path.parent, path.stem, [f"run_dir='{run_dir}'", "run_name=test", *overrides])


def header(path: Path) -> dict[str, str]:
    """The header of a recipe: field (`Model` for the first line, `GPUs`, `Memory per GPU`, `Data`, ...) -> text.

    A line that starts with more than two spaces goes on with the field above it.
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#"))
    fields = {"Model": lines[0].strip()}
    field = "Model"
    for line in lines[1:]:
        for part in re.split(r"(?<=\.) (?=Memory per GPU:)", line):
            if match := re.match(r" ?([A-Z][A-Za-z -]+): +(.*)", part):
                field, text = match[1], match[2]
                fields[field] = text
            else:
                fields[field] += ("\n" if part.startswith("   ") else " ") + part.strip()
    return fields


def data_commands(path: Path) -> list[list[str]]:
    """The `pods data` commands of a header, as words after `pods`."""
    return [shlex.split(line)[1:] for line in header(path)["Data"].splitlines()]


def baseline(path: Path) -> list[str]:
    """The overrides of a header that make it plain GRPO."""
    return shlex.split(header(path)["Baseline"].removeprefix("..."))


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a plain mapping, without its defaults list."""
    for key, value in config.items():
        if prefix == "" and key == "defaults":
            continue
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def raw(path: Path) -> dict[str, Any]:
    """A recipe's own file."""
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(content, dict)
    return content
