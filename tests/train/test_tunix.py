"""The policy's loss beside tunix's `grpo_loss_fn`: the values and gradients that its source gave."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m3jax.train.policy import Correction, PolicyLoss

CASES = json.loads((Path(__file__).parent / "tunix_losses.json").read_text(encoding="utf-8"))["cases"]
LOSSES = {
    "grpo": PolicyLoss(mean="sequence", dual_clip=None),
    "kl": PolicyLoss(kl_weight=0.1, dual_clip=None),
    "dual clip": PolicyLoss(dual_clip=1.2),
    "gspo": PolicyLoss(level="sequence", mean="sequence", clip_low=0.1, dual_clip=None),
    "on policy": PolicyLoss(kl_weight=0.1, dual_clip=None),
    "tis": PolicyLoss(dual_clip=None, correction=Correction(weigh="token")),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_tunix_s(name):
    case = {key: np.array(value, bool if key == "mask" else np.float32) for key, value in CASES[name].items()}
    wanted, gradient, new = case.pop("loss"), case.pop("gradient"), jnp.asarray(case.pop("new"))
    given = {key: jnp.asarray(value) for key, value in case.items()}
    loss, found = jax.value_and_grad(lambda new: LOSSES[name](new=new, **given)[0])(new)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-7)
    assert gradient.any()
