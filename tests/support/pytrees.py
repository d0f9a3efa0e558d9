"""Dataclasses that are pytrees: a program takes their arrays, and is compiled for their settings."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType, UnionType
from typing import Union, get_args, get_origin

import jax
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from m3jax.config import M3Config
from m3jax.execution import Execution
from m3jax.msa import SelectionRules

# Types of settings: numbers, names, devices and configurations, none of which is an array.
SETTINGS = (bool, int, float, str, type(None), Mesh, M3Config, SelectionRules, Execution, PyTreeDef)


def trees_of(package: ModuleType) -> Iterator[type]:
    """Yield the dataclasses of a package, and of the packages in it, that jax takes apart."""
    paths = getattr(package, "__path__", [])
    modules = [
        package,
        *(importlib.import_module(x.name) for x in pkgutil.walk_packages(paths, package.__name__ + ".")),
    ]
    for module in modules:
        for _, member in inspect.getmembers(module, inspect.isclass):
            is_own = member.__module__ == module.__name__ and hasattr(member, "__dataclass_fields__")
            if is_own and not jax.tree_util.all_leaves([_with_names(member)]):
                yield member


def is_setting(annotation: object) -> bool:
    """True of what no program computes with, as `int | None` and `tuple[str, ...]`."""
    if annotation == DTypeLike or annotation in SETTINGS:
        return True
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    return get_origin(annotation) in (tuple, Union, UnionType) and all(map(is_setting, parts))


def assert_settings_are_static(package: ModuleType) -> None:
    """A program is compiled for a setting, and takes everything else; a setting as a leaf would be traced."""
    trees = list(trees_of(package))
    assert trees, f"{package.__name__} has no dataclass that is a pytree"
    for tree in trees:
        leaves = set(jax.tree.leaves(_with_names(tree)))
        settings = {field.name for field in fields(tree) if is_setting(field.type)}
        assert leaves == {field.name for field in fields(tree)} - settings, f"{tree.__name__}: {settings} are settings"


def _with_names(tree: type) -> object:
    """Return an object of a class with each field's own name as its value; nothing of the class is run."""
    named = object.__new__(tree)
    for field in fields(tree):
        object.__setattr__(named, field.name, field.name)
    return named
