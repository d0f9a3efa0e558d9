"""Low-rank adapters: W + (alpha / r) B A, of attention's projections and of routed experts, in PEFT's layout on disk.

The model does not know of them: a loss trains the adapters alone, on a model that they are merged into as it is
computed. Letters: R rank; the rest as everywhere.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jaxtyping import Array, Float, Shaped

from m3jax.checkpoint import tree
from m3jax.files import read_json, replace_file
from m3jax.files.tensors import mapped, packed, read_header
from m3jax.messages import listed, printable
from m3jax.model import M3
from m3jax.parallel import put, sharding
from m3jax.train.sft import SFTLoss
from m3jax.train.step import TrainState, check_trainable
from m3jax.train.units import stream_unit

# By the matrix that they are added to: {"a": [L In R], "b": [L R Out]} of attention, with all its heads in one axis,
# and [L E In R], [L E R Out] of experts, where gate and up are one matrix with one "a".
Adapters = dict[str, dict[str, Array]]

TARGETS = ("attention", "experts")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Modules of transformers' MiniMaxM3SparseForConditionalGeneration, as PEFT matches them: not the vision tower's, and
# not the index branch's.
_MODULES = r"(?!.*vision).*\.layers\.\d+\.self_attn\.[qkvo]_proj"
_LAYER = "base_model.model.model.language_model.layers."
_KEY = re.compile(r"^base_model\.model\.(?:.*\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.(?:default\.)?weight$")
_BASE_KEY = "m3jax_base"  # of the file's metadata: the digest of the model that the adapters were trained on


@dataclass(frozen=True)
class LoraSettings:
    """The shape of a set of adapters.

    Attributes:
      rank: R.
      alpha: the adapters count alpha / rank times.
      targets: "attention" (its four projections, in all layers), "experts" (the routed ones), or both.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank = {self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"alpha = {self.alpha}: must be above 0")
        if not self.targets or any(name not in TARGETS for name in self.targets):
            raise ValueError(f"targets = {', '.join(self.targets) or 'none'}: choose of {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """The factor of the product of an adapter's two matrices."""
        return self.alpha / self.rank


def init_adapters(model: M3, settings: LoraSettings, seed: int = 0) -> Adapters:
    """Return adapters that change nothing yet: A is random, B is 0.

    Args:
      model: that they will be added to.
      settings: their shape.
      seed: of A.

    Raises:
      ValueError: none of these matrices, or a model that was made of a Llama: adapters have no units of its stream.

    Source: PEFT's `init_lora_weights=True`: A uniform within In**-0.5.
    """
    if stream_unit(model.config) != 1:
        raise ValueError("this model was made of a Llama, and its residual stream is stored in units that adapters do "
                         "not have: train all its weights, or add adapters to the Llama")  # fmt: skip
    where = sharding((), (), model.mesh)
    draw, adapters = np.random.default_rng(seed), {}
    for name, (lead, inputs, outputs) in _shapes(model, settings.targets).items():
        a = draw.uniform(-(inputs**-0.5), inputs**-0.5, (*lead, inputs, settings.rank)).astype(np.float32)
        b = np.zeros((*lead, settings.rank, outputs), np.float32)
        adapters[name] = {"a": put(a, where), "b": put(b, where)}
    if not adapters:
        raise ValueError(f"the model has none of {', '.join(settings.targets)}: there is nothing to add adapters to")
    return adapters


def merge(model: M3, adapters: Adapters, scale: float) -> M3:
    """Return the model with adapters added to its weights: summed in float32, and rounded once to the weights' dtype.

    Args:
      model: not changed.
      adapters: of its shape.
      scale: of the products, `LoraSettings.scale`.
    """
    weights = dict(tree.flatten(model))

    def add(name: str, delta: Float[Array, "..."]) -> None:
        weight = weights[name]
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        weights[name] = (weight.astype(wide) + scale * delta.reshape(weight.shape).astype(wide)).astype(weight.dtype)

    for name, pair in adapters.items():
        delta = jnp.einsum("...ir,...ro->...io", pair["a"], pair["b"], precision="highest")  # [L (E) In Out]
        if name.endswith(_GATE_UP):
            gate, up = jnp.split(delta, 2, axis=-1)
            experts = name.removesuffix("gate_up_proj")
            add(f"{experts}gate_proj", gate)
            add(f"{experts}up_proj", up)
        else:
            add(name, delta)
    return tree.replace(model, weights)


@dataclass(frozen=True)
class LoraLoss:
    """The loss of a model with adapters, as a function of the adapters alone.

    Attributes:
      loss_fn: of the model.
      scale: `LoraSettings.scale`.
    """

    loss_fn: SFTLoss
    scale: float

    def __call__(self, adapters: Adapters, batch: Mapping[str, Any]) -> tuple[Float[Array, ""], dict[str, Any]]:
        """Return the loss and its parts.

        Args:
          adapters: in float32.
          batch: of `loss_fn`, and base, the model, which gets no gradient.
        """
        return self.loss_fn(merge(jax.lax.stop_gradient(batch["base"]), adapters, self.scale), batch)


def init_adapter_state(adapters: Adapters, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state of a training of adapters at step 0; an optimiser's moments are of the adapters alone.

    Args:
      adapters: copied.
      optimizer: from `m3jax.train.step.make_optimizer`.
    """
    everywhere = jax.tree.leaves(adapters)[0].sharding
    put = lambda x: jax.device_put(x, everywhere, may_alias=False)
    return jax.tree.map(put, TrainState(jnp.int32(0), adapters, optimizer.init(adapters)))


def save_adapters(
    adapters: Adapters, settings: LoraSettings, model: M3, folder: str | Path, base: str | None = None
) -> None:
    """Write adapters as PEFT does: adapter_config.json and adapter_model.safetensors, in float32.

    Names are those of transformers' modules, so that PEFT loads the folder onto
    `MiniMaxM3SparseForConditionalGeneration`. PEFT gives experts, which are parameters and no modules, one factor for
    all of them, with row e R + r of A and column r E + e of B being those of expert e.

    Args:
      adapters: of the model.
      settings: of them.
      model: that they belong to.
      folder: made if it is not there.
      base: the model's name, for the reader of the file.

    Source: PEFT 0.21.2, `lora.ParamWrapper`.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, pair in adapters.items():
        number, module = _split(name)
        a, b = (np.asarray(pair[x], np.float32) for x in "ab")
        for layer in range(len(a)):
            prefix = f"{_LAYER}{model.config.stacks[number].first_layer + layer}.{_key_module(module)}"
            if a.ndim == 4:
                stored_a = a[layer].swapaxes(1, 2).reshape(-1, a.shape[2])  # [E In R] -> [(E R) In]
                stored_b = b[layer].transpose(2, 1, 0).reshape(b.shape[3], -1)  # [E R Out] -> [Out (R E)]
            else:
                stored_a, stored_b = a[layer].T, b[layer].T  # [R In], [Out R]
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(stored_a)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(stored_b)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": settings.rank,
        "lora_alpha": settings.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "inference_mode": True,
        "target_modules": _MODULES if "attention" in settings.targets else [],
        "target_parameters": [_GATE_UP, _DOWN] if "experts" in settings.targets else None,
    }  # fmt: skip
    data = packed(tensors, {"format": "pt", _BASE_KEY: digest(model)})
    if jax.process_index():
        return  # every process has all of them, and one writes
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_FILE, data)
    replace_file(folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())


def load_adapters(folder: str | Path, model: M3) -> tuple[Adapters, LoraSettings]:
    """Read adapters in PEFT's layout: those that `save_adapters` or PEFT itself wrote.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      model: that they are for.

    Returns:
      The adapters, and their settings.

    Raises:
      ValueError: another kind of adapter, adapters of another model, or files that cannot be read so.
      OSError: a file cannot be read.
    """
    folder = Path(folder)
    named = printable(str(folder))
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ValueError(f"{named} has no {file}: give a folder in PEFT's layout")
    settings = _settings_of(read_json(folder / CONFIG_FILE, called="an adapter's config"), named)
    stored = mapped(folder / WEIGHTS_FILE, str(folder / WEIGHTS_FILE))
    with open(folder / WEIGHTS_FILE, "rb") as stream:
        trained_on = (read_header(stream)[0].get("__metadata__") or {}).get(_BASE_KEY)
    if trained_on not in (None, digest(model)):
        raise ValueError(f"{named}: these adapters were trained on another model ({trained_on[:12]}, this one is "
                         f"{digest(model)[:12]}): give that one")  # fmt: skip
    shapes, rank = _shapes(model, settings.targets), settings.rank
    adapters: dict[str, dict[str, np.ndarray]] = {
        name: {"a": np.zeros((*lead, inputs, rank), np.float32), "b": np.zeros((*lead, rank, outputs), np.float32)}
        for name, (lead, inputs, outputs) in shapes.items()
    }
    places = {
        (model.config.stacks[number].first_layer + layer, _key_module(module)): (name, layer)
        for name in shapes
        for number, module in [_split(name)]
        for layer in range(model.config.stacks[number].num_layers)
    }
    unfilled = {(*place, factor) for place in places for factor in "AB"}
    problems = []
    for key, value in stored.items():
        match = _KEY.match(key)
        place = match and (int(match[1]), match[2])
        if place not in places:
            problems.append(f"{key}: the model has no such matrix, or no adapters are kept for it")
            continue
        name, layer = places[place]
        array = adapters[name][match[3].lower()]
        wanted = _stored_shape(array.shape[1:], match[3])
        if value.shape != wanted:
            problems.append(f"{key}: shape {list(value.shape)}, the model needs {list(wanted)}")
            continue
        array[layer] = _from_stored(np.asarray(value, np.float32), array.shape[1:], match[3])
        unfilled.discard((*place, match[3]))
    problems += [f"layer {layer}: no lora_{factor} of {module}" for layer, module, factor in sorted(unfilled)]
    if problems:
        raise ValueError(f"{named}: these adapters are not of this model: {listed(problems)}")
    where = sharding((), (), model.mesh)
    return jax.tree.map(lambda x: put(x, where), adapters), settings


def merge_folder(model: M3, folder: str | Path) -> M3:
    """Return a model with the adapters of a folder added to its weights.

    Args:
      model: that they were trained on, in a float dtype.
      folder: in PEFT's layout.

    Raises:
      ValueError: as `load_adapters`, and for weights in MXFP8: dequantise them first.
    """
    check_trainable(model)
    adapters, settings = load_adapters(folder, model)
    return merge(model, adapters, settings.scale)


def digest(model: M3) -> str:
    """Return a digest by which a model is known: of its norms' weights in bfloat16, whatever dtype it is loaded in.

    Args:
      model: of any dtype.
    """
    found = hashlib.sha256()
    for name, leaf in sorted(tree.flatten(model).items()):
        if "norm" in name and not name.startswith("vision."):
            found.update(np.asarray(leaf.astype(jnp.float32)).astype(ml_dtypes.bfloat16).tobytes())
    return found.hexdigest()


def _shapes(model: M3, targets: tuple[str, ...]) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return (leading axes, In, Out) of each matrix that gets adapters, by its name; gate and up are one."""
    weights, out = tree.flatten(model), {}
    for number, stack in enumerate(model.config.stacks):
        if "attention" in targets:
            for module in _ATTENTION:
                name = f"stacks.{number}.self_attn.{module}"
                depth, *dims = weights[name].shape
                num_inputs = 2 if module == "o_proj" else 1  # [L N H D], else [L D N H]
                out[name] = (depth,), prod(dims[:num_inputs]), prod(dims[num_inputs:])
        if "experts" in targets and stack.is_moe:
            depth, experts, width, hidden = weights[f"stacks.{number}.mlp.experts.gate_proj"].shape
            out[f"stacks.{number}.{_GATE_UP}"] = (depth, experts), width, 2 * hidden
            out[f"stacks.{number}.{_DOWN}"] = (depth, experts), hidden, width
    return out


def _split(name: str) -> tuple[int, str]:
    """Return the stack and the module of a matrix's name."""
    _, number, module = name.split(".", 2)
    return int(number), module


def _key_module(module: str) -> str:
    """Return what PEFT calls a matrix: of two adapted parameters of a module the first lies under the second."""
    return {_GATE_UP: "mlp.experts.base_layer", _DOWN: "mlp.experts"}.get(module, module)


def _stored_shape(shape: tuple[int, ...], factor: str) -> tuple[int, int]:
    """Return the shape in a file of one layer's factor, [In R] or [R Out], with experts [E In R] or [E R Out]."""
    *experts, rows, columns = shape
    count = prod(experts)
    return (count * columns, rows) if factor == "A" else (columns, rows * count)


def _from_stored(value: Shaped[np.ndarray, "X Y"], shape: tuple[int, ...], factor: str) -> Shaped[np.ndarray, "..."]:
    """Return one layer's factor as it is here."""
    if len(shape) == 2:
        return value.T
    experts, rows, columns = shape
    if factor == "A":
        return value.reshape(experts, columns, rows).swapaxes(1, 2)  # [(E R) In] -> [E In R]
    return value.reshape(columns, rows, experts).transpose(2, 1, 0)  # [Out (R E)] -> [E R Out]


def _settings_of(config: Mapping[str, Any], named: str) -> LoraSettings:
    """Return the settings in an adapter's config; ValueError for what is no plain LoRA of these matrices."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{named}: peft_type = {config.get('peft_type')!r}: only LORA is read")
    for name in ("use_dora", "use_rslora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise ValueError(f"{named}: {name} = {config[name]!r}: only plain LoRA of one rank is read")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(f"{named}: r = {rank!r}, lora_alpha = {alpha!r}: both are numbers")
    present = {"attention": config.get("target_modules"), "experts": config.get("target_parameters")}
    return LoraSettings(rank, float(alpha), tuple(name for name in TARGETS if present[name]))
