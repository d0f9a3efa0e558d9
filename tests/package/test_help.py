"""`help()` of what users call says what each argument is."""

import importlib
import inspect
import re
from functools import cache

import pytest

ROOMS = ("m3jax", "m3jax.dialogue", "m3jax.msa", "m3jax.ops", "m3jax.decoding", "m3jax.cache", "m3jax.checkpoint",
         "m3jax.parallel", "m3jax.model", "m3jax.text")  # fmt: skip
CLASSES = ("m3jax.M3", "m3jax.M3Config", "m3jax.TextModel", "m3jax.Tokenizer", "m3jax.decoding.Engine",
           "m3jax.dialogue.Dialogue", "m3jax.text.ChatTemplate", "m3jax.text.OutputParser")  # fmt: skip


def found(name: str):
    room, _, member = name.rpartition(".")
    return getattr(importlib.import_module(room), member)


@cache
def functions() -> dict:
    """Public functions by name: those of the rooms, and the methods of what users hold in their hands."""
    named = {
        f"{room}.{name}": found(f"{room}.{name}") for room in ROOMS for name in importlib.import_module(room).__all__
    }
    of_rooms = {name: value for name, value in named.items() if inspect.isfunction(value)}
    methods = {
        f"{owner}.{name}": getattr(value, "__func__", value)
        for owner in CLASSES
        for name, value in vars(found(owner)).items()
        if name == "__call__" or not name.startswith("_")
    }
    return of_rooms | {name: value for name, value in methods.items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", functions())
def test_every_argument_is_said(name):
    function = functions()[name]
    said = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(function) or "", re.M | re.S)
    # The engine's docstring says once what a handle is.
    arguments = [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "handle")]
    missing = [argument for argument in arguments if not re.search(rf"\b{argument}\b", said[1] if said else "")]
    assert not missing, f"help({name}) does not say what {', '.join(missing)} is: its docstring needs Args"
