"""Drafters by the names that a user or the command line gives, read before the model is."""

from os import PathLike

from jax.sharding import Mesh

from m3jax.checkpoint.draft import load_draft
from m3jax.config import M3Config
from m3jax.decoding import Drafter, Eagle3Drafter, PromptLookup


def named_drafter(name: str | PathLike[str], config: M3Config, dtype: str, mesh: Mesh | None) -> Drafter:
    """Return a drafter before there is a model, so that a draft's faults show before the model's weights are read.

    Args:
      name: "builtin" for the embedded checkpoint's draft, "ngram" for prompt lookup, or the folder of an EAGLE3 draft.
      config: of the target.
      dtype: of the draft; the target's is best.
      mesh: where the target will lie.

    Raises:
      ValueError: a draft that cannot be read or is for another target.
    """
    if name == "ngram":
        return PromptLookup()
    return Eagle3Drafter(load_draft(None if name == "builtin" else name, config, dtype, mesh))
