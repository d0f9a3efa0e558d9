"""The loss that trains the embedded checkpoint: recalled values, a teacher, pictures, beside the library's own loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from tiny.pictures.features import naming_loss, picture_features

from m3jax.model import M3
from m3jax.train.losses import MSALoss, layer_parts, next_token_loss

KEYS = ("tokens", "weights", "recall", "kept", "pictures", "naming")  # what the loss reads of a batch


@dataclass(frozen=True)
class TinyLoss(MSALoss):
    """`MSALoss` with extra weight of recalled values, and what else a batch asks for.

    Attributes:
      recall_weight: extra weight of the targets that are recalled values.
      naming_weight: weight of `naming_loss`, where a batch has what pictures show.
    """

    recall_weight: float = 0.0
    naming_weight: float = 1.0

    def __call__(self, model: M3, batch: Mapping[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss of a batch and its parts.

        Args:
          model: float32 master weights; its schedule says whether attention is dense or sparse.
          batch: as of `MSALoss`, and recall [B T], whether a target is a recalled value; "pictures" where some tokens
            stand for them, and "naming" where the tower is to learn what they show; "teacher", a model whose
            predictions are to be kept where "kept" [B T] says so: a target there is its distribution, not the one
            token that followed.

        Returns:
          (loss, parts) of `MSALoss`, with "recall", the loss of recalled values alone, and "naming" where the batch
          has it.
        """
        offset = self.offset(batch)
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        compute_model = self.prepare(model)
        features, embeddings = None, None
        if "pictures" in batch:
            features = picture_features(compute_model, batch["pictures"])  # [S R D]
            places = batch["pictures"].places.reshape(-1)
            embeddings = compute_model.embed(tokens, features.reshape(-1, features.shape[-1]), places)
        logits, measures = self.read(compute_model, tokens, offset, embeddings)
        weights = batch["weights"] * (1.0 + self.recall_weight * batch["recall"])
        if "teacher" in batch and "kept" in batch:
            # A plain call and not `read`: nobody asks for the teacher's index loss.
            teacher = self.prepare(batch["teacher"])
            expected = jax.lax.stop_gradient(teacher(tokens))
            lm = kept_loss(logits, targets, weights, expected, batch["kept"])
        else:
            lm = next_token_loss(logits, targets, weights)
        recall = next_token_loss(jax.lax.stop_gradient(logits), targets, batch["recall"].astype(logits.dtype))
        parts = {"lm": lm, "recall": recall, **layer_parts(measures)}
        # Rows of pictures are short: nearly all blocks are selected there, and which are says little.
        loss = lm if "pictures" in batch else lm + self.kl_weight * parts["kl"]
        if features is not None and "naming" in batch:
            parts["naming"] = naming_loss(features, compute_model.embed_tokens[...], batch["naming"])
            loss = loss + self.naming_weight * parts["naming"]
        return loss, parts


def kept_loss(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    expected: Float[Array, "B T V"],
    kept: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """`next_token_loss`, but where `kept` the target is the whole distribution of a model that is not to be forgotten.

    Cross-entropy against softmax(expected) is lowest where the predictions are that model's, however often the text was
    seen: training goes on for a new task and neither forgets the old text nor learns it by heart.

    Args:
      logits: of the model in training.
      targets: the tokens that followed.
      weights: of the targets, of either kind.
      expected: logits of the model that is kept.
      kept: where its distribution is the target.

    Source: learning without forgetting (Li and Hoiem, arXiv:1606.09282), with temperature 1.
    """
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)  # [B T]
    of_token = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    of_distribution = jnp.sum(jax.nn.softmax(expected, axis=-1) * logits, axis=-1)
    losses = log_normaliser - jnp.where(kept, of_distribution, of_token)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)
