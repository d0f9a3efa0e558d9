"""MiniMax-M3 in JAX: the model, MiniMax Sparse Attention, and a generate loop."""

from importlib import import_module
from importlib.util import find_spec

from m3jax.version import VERSION

TYPE_CHECKING = False  # that of `typing`, as a type checker reads the name, without the time of its import
if TYPE_CHECKING:
    from m3jax.arrays import checks
    from m3jax.completion import generate
    from m3jax.config import M3Config
    from m3jax.decoding import score
    from m3jax.dialogue import chat
    from m3jax.hub import M3, hub_parameters, init, load, quantize, save
    from m3jax.parallel import make_mesh
    from m3jax.text import Tokenizer
    from m3jax.text_model import TextModel

__version__ = VERSION
__all__ = [
    "M3",
    "M3Config",
    "TextModel",
    "Tokenizer",
    "chat",
    "checks",
    "generate",
    "hub_parameters",
    "init",
    "load",
    "make_mesh",
    "quantize",
    "save",
    "score",
]

# Where each name comes from. It is imported when it is first asked for: a command line whose arguments are wrong, or
# that is asked for help, answers without jax.
_HOMES = {
    "M3": "m3jax.hub",
    "M3Config": "m3jax.config",
    "TextModel": "m3jax.text_model",
    "Tokenizer": "m3jax.text",
    "chat": "m3jax.dialogue",
    "checks": "m3jax.arrays",
    "generate": "m3jax.completion",
    "hub_parameters": "m3jax.hub",
    "init": "m3jax.hub",
    "load": "m3jax.hub",
    "make_mesh": "m3jax.parallel",
    "quantize": "m3jax.hub",
    "save": "m3jax.hub",
    "score": "m3jax.decoding",
}


def __getattr__(name: str) -> object:
    """A public name, or a submodule, at its first use."""
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
