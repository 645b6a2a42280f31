"""Which keys of a composed config verl has: from its YAML files and the dataclasses that these name.

Read from verl's source, not by importing it, which takes seconds and would do it in the launcher.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

# Handed on as they are to somebody else (Ray, Megatron): verl lists a few keys there, not all.
_FREE = frozenset({"ray_init", "override_transformer_config"})


def unknown_key(
    config: DictConfig, schema: DictConfig, verl_folder: Path, added: Sequence[str] = ()
) -> tuple[str, str | None] | None:
    """The first key of a config that the schema does not have.

    Args:
        config: What was composed from a recipe.
        schema: What is composed without one.
        verl_folder: Where the package verl lies.
        added: Keys that are allowed all the same, and what is under them.

    Returns:
        The key with dots and the nearest known one, which may be None; None where all are known. A mapping that
        is empty or null in the schema takes any key.
    """
    return _walk(config, schema, verl_folder, frozenset(added), "")


def _walk(
    config: DictConfig, schema: DictConfig, verl_folder: Path, added: frozenset[str], prefix: str
) -> tuple[str, str | None] | None:
    known = set(map(str, schema))  # `in schema` says no to a key whose value is ???
    for key in map(str, config):
        path = f"{prefix}{key}"
        if path in added or (key not in known and any(word.startswith(f"{path}.") for word in added)):
            continue
        if key not in known:
            fields = _fields(schema, verl_folder)
            if key not in fields:
                near = difflib.get_close_matches(key, known | fields, n=1, cutoff=0.6)
                return path, f"{prefix}{near[0]}" if near else None
            continue
        below, known_below = config._get_node(key), schema._get_node(key)
        if not isinstance(below, DictConfig) or below._is_none() or below._is_interpolation():
            continue
        if not isinstance(known_below, DictConfig) or known_below._is_none() or not len(known_below):
            continue
        if key not in _FREE and (found := _walk(below, known_below, verl_folder, added, f"{path}.")):
            return found
    return None


def _fields(schema: DictConfig, verl_folder: Path) -> set[str]:
    """Fields of the dataclass that verl makes of this mapping, where it names one."""
    target = schema.get("_target_")
    if not isinstance(target, str) or not target.startswith("verl."):
        return set()
    module, _, name = target.removeprefix("verl.").rpartition(".")
    return set(_dataclass_fields(verl_folder.joinpath(*module.split(".")), name))


@functools.lru_cache(maxsize=64)
def _dataclass_fields(module: Path, name: str) -> frozenset[str]:
    for node in _classes(module).get(name, ()):
        fields = {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        for base in node.bases:
            if isinstance(base, ast.Name):
                fields |= _dataclass_fields(module, base.id)
        return frozenset(fields)
    return frozenset()


@functools.lru_cache(maxsize=16)
def _classes(module: Path) -> dict[str, list[ast.ClassDef]]:
    """Class definitions of a module, or of all modules of a package: a config package re-exports its classes."""
    files = sorted(module.glob("*.py")) if module.is_dir() else [module.with_suffix(".py")]
    found: dict[str, list[ast.ClassDef]] = {}
    for file in files:
        if file.is_file():
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found
