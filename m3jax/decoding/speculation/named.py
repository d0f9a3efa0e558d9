"""Drafters by name, as an engine takes them."""

from os import PathLike, fspath

from m3jax.decoding.protocols import TargetModel
from m3jax.decoding.speculation.drafter import Drafter
from m3jax.decoding.speculation.prompt_lookup import PromptLookup
from m3jax.messages import shown


def as_drafter(draft: Drafter | str | PathLike[str] | None, model: TargetModel) -> Drafter | None:
    """Return the drafter that a name, a folder or a drafter itself stands for.

    Args:
      draft: "ngram" for prompt lookup, a name or a folder that the model's `load_drafter` knows, a drafter, or None.
        An `M3` loads "builtin", the embedded checkpoint's draft, and the folder of an EAGLE3 draft.
      model: the target.

    Returns:
      The drafter; None for None.

    Raises:
      ValueError: something else, or a draft that cannot be read or is for another target.
    """
    if draft is None or isinstance(draft, Drafter):
        return draft
    if not isinstance(draft, str | PathLike):
        raise ValueError(f"draft is {shown(draft)}: give 'builtin', 'ngram', an EAGLE3 draft's folder, or a drafter")
    if draft == "ngram":
        return PromptLookup()
    load = getattr(model, "load_drafter", None)  # a method of `m3jax.hub.M3`
    if load is None:
        raise ValueError(
            f"draft = {shown(fspath(draft))}: a {type(model).__name__} loads no draft by its name, an M3 of m3jax.load "
            "does; give a drafter or 'ngram'"
        )
    return load(draft)
