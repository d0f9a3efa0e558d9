"""Drafters by name, as the command line and a user write them."""

from os import PathLike, fspath

from jax.sharding import Mesh

from m3jax.checkpoint.draft import load_draft
from m3jax.config import M3Config
from m3jax.decoding.protocols import TargetModel
from m3jax.decoding.speculation import Drafter, Eagle3Drafter, PromptLookup
from m3jax.messages import shown
from m3jax.model import M3


def as_drafter(draft: Drafter | str | PathLike[str] | None, model: TargetModel) -> Drafter | None:
    """The drafter that a user means.

    Args:
      draft: "builtin" for the embedded checkpoint's draft, "ngram" for prompt lookup, the folder of an EAGLE3 draft, a
        drafter, or None.
      model: the target; a draft is loaded in its dtype, and where it lies.

    Returns:
      The drafter; None for None.

    Raises:
      ValueError: anything else, or a draft that cannot be read or is for another target.
    """
    if draft is None or isinstance(draft, Drafter):
        return draft
    if not isinstance(draft, str | PathLike):
        raise ValueError(f"draft is {shown(draft)}: give 'builtin', 'ngram', an EAGLE3 draft's folder, or a drafter")
    if draft == "ngram":
        return PromptLookup()
    if not isinstance(model, M3):
        raise ValueError(f"draft = {shown(fspath(draft))}: an EAGLE3 draft is for an M3, not a {type(model).__name__}")
    return named_drafter(draft, model.config, str(model.dtype), model.mesh)


def named_drafter(name: str | PathLike[str], config: M3Config, dtype: str, mesh: Mesh | None) -> Drafter:
    """A drafter before there is a model: what is wrong with a draft is said before the model's weights are read.

    Args:
      name: as in `as_drafter`.
      config: of the target.
      dtype: of the draft; the target's is best.
      mesh: where the target will lie.

    Raises:
      ValueError: a draft that cannot be read or is for another target.
    """
    if name == "ngram":
        return PromptLookup()
    return Eagle3Drafter(load_draft(None if name == "builtin" else name, config, dtype, mesh))
