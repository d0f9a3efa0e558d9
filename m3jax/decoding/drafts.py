"""Drafters by name, as the command line and a user write them."""

from os import PathLike, fspath

from m3jax.checkpoint.draft import load_draft
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
    folder = None if draft == "builtin" else draft
    return Eagle3Drafter(load_draft(folder, model.config, str(model.dtype), model.mesh))
