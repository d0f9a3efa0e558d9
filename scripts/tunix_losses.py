"""Writes tests/train/tunix_losses.json: losses and gradients of tunix's own `grpo_loss_fn`, for some settings.

    pip download google-tunix==0.1.7 --no-deps -d wheels
    python scripts/tunix_losses.py wheels/google_tunix-0.1.7-py3-none-any.whl

The functions' source is taken out of the wheel and run as it stands. Only what reads log-probabilities from a model is
replaced, by the log-probabilities themselves: the package and what it depends on need not be installed.
"""

import argparse
import ast
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FILE = Path(__file__).resolve().parents[1] / "tests" / "train" / "tunix_losses.json"
ROWS, LENGTH = 3, 6
SETTINGS = {
    "grpo": dict(loss_algo="grpo", loss_agg_mode="sequence-mean-token-mean", beta=0.0),
    "kl": dict(loss_algo="grpo", loss_agg_mode="token-mean", beta=0.1),
    "dual clip": dict(loss_algo="grpo", loss_agg_mode="token-mean", beta=0.0, epsilon_c=1.2),
    "gspo": dict(loss_algo="gspo-token", loss_agg_mode="sequence-mean-token-mean", beta=0.0, epsilon=0.1),
    "on policy": dict(loss_algo="grpo", loss_agg_mode="token-mean", beta=0.1),
    "tis": dict(loss_algo="grpo", loss_agg_mode="token-mean", beta=0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    args = parser.parse_args()
    loss_fn = loss_of_wheel(args.wheel)
    cases = {name: case(loss_fn, name, settings, seed) for seed, (name, settings) in enumerate(SETTINGS.items())}
    out = {"made by": f"scripts/tunix_losses.py {args.wheel.name}, jax {jax.__version__}", "cases": cases}
    FILE.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


def loss_of_wheel(wheel: Path) -> Any:
    """Return `grpo_loss_fn` of a wheel, over log-probabilities in the place of a model."""
    names = dict(jax=jax, jnp=jnp, Any=Any, nnx=SimpleNamespace(split=lambda model: (None, model)))
    common = define(wheel, "tunix/rl/common.py", ("compute_kl_divergence", "aggregate_loss", "_check_get_norm"), names)
    common["compute_per_token_logps"] = lambda graphdef, logps, **_: (logps, None)
    names |= dict(common=SimpleNamespace(**common))
    names |= define(wheel, "tunix/rl/algo_core.py", ("masked_mean",), names)
    names["compute_entropy_from_logits"] = lambda logits: jnp.zeros(())  # a figure beside the loss
    return define(wheel, "tunix/rl/algo_core.py", ("grpo_loss_fn",), names)["grpo_loss_fn"]


def define(wheel: Path, member: str, wanted: tuple[str, ...], names: dict[str, Any]) -> dict[str, Any]:
    """Return some functions of a file in a wheel, without decorators, defined over the given names."""
    with zipfile.ZipFile(wheel) as archive:
        tree = ast.parse(archive.read(member).decode("utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in found:
        node.decorator_list = []
    scope = dict(names)
    exec(compile(ast.Module(found, []), member, "exec"), scope)
    return {name: scope[name] for name in wanted}


def case(loss_fn: Any, name: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return one set of arguments with tunix's loss and its gradient by the new policy's log-probabilities."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2, (ROWS, LENGTH))
    near = lambda: (old + 0.4 * rng.normal(size=old.shape)).astype(np.float32)
    new, sampler, reference = near(), near(), near()
    old = new if name == "on policy" else old.astype(np.float32)
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[:, 0] = True  # of rows without a token tunix takes no mean
    advantages = rng.normal(size=ROWS).astype(np.float32)
    config = SimpleNamespace(**dict(epsilon=0.2, epsilon_high=0.28, epsilon_c=None, temperature=1.0,
                                    kl_loss_mode="low_var_kl", kl_clamp_value=None) | settings)  # fmt: skip
    example = SimpleNamespace(
        completion_ids=None, completion_mask=jnp.asarray(mask, jnp.float32), prompt_ids=None,
        advantages=jnp.asarray(advantages), old_per_token_logps=None if name == "on policy" else jnp.asarray(old),
        ref_per_token_logps=jnp.asarray(reference) if config.beta else None,
        sampler_is_weights=jnp.minimum(jnp.exp(old - sampler), 2.0) if name == "tis" else None,
    )  # fmt: skip
    of_new = lambda new: loss_fn(new, example, config, 0, 1)[0]
    loss, gradient = jax.value_and_grad(of_new)(jnp.asarray(new))
    arrays = dict(new=new, old=old, sampler=sampler, reference=reference, advantages=advantages, mask=mask)
    arrays |= dict(gradient=np.asarray(gradient))
    return {"loss": float(loss), **{key: value.tolist() for key, value in arrays.items()}}


if __name__ == "__main__":
    main()
