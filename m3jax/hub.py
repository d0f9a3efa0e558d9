"""The model and the hub's layout: `load` and `save`, and what reads and writes folders as methods of the model."""

from os import PathLike

from m3jax.checkpoint import hub_parameters, load, save
from m3jax.completion import named_drafter
from m3jax.decoding import Drafter
from m3jax.model import M3, init, quantize


def load_drafter(model: M3, name: str | PathLike[str]) -> Drafter:
    """Read a draft of a model, in its dtype and where it lies.

    Args:
      model: the target.
      name: as in `m3jax.completion.named_drafter`.

    Raises:
      ValueError: a draft that cannot be read or is for another target.
    """
    return named_drafter(name, model.config, str(model.dtype), model.mesh)


# Set here because m3jax.model and m3jax.decoding do not import anything that reads or writes files.
M3.save_pretrained = save
M3.load_drafter = load_drafter

__all__ = ["M3", "hub_parameters", "init", "load", "quantize", "save"]
