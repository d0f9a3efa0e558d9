"""Golden vectors before they are files: inputs drawn by numpy, a rule, and functions that give the outputs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

Arrays = Mapping[str, Shaped[np.ndarray | Array, "..."]]
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """The inputs of one golden vector, and the rule by which its outputs follow from them.

    Attributes:
      name: of the case in its group, and of its file.
      what: one sentence on what the case is there for.
      rule: numbers that are no arrays, such as block_size and top_k.
      seed: of numpy's generator, from which the inputs come.
      inputs: by name. Activations and weights are bfloat16, so that every dtype holds them exactly; what a checkpoint
        keeps wider, as the router, is float32.
      traps: those of docs/glossary.md that the case finds.
    """

    name: str
    what: str
    rule: Rule
    seed: int
    inputs: Arrays
    traps: tuple[str, ...] = ()


class Run(NamedTuple):
    """One way of this package to compute a case's outputs, as `check` tries them."""

    label: str
    dtype: str
    outputs: Arrays


@dataclass(frozen=True)
class Group:
    """A group of cases that test one operation.

    Attributes:
      name: also the folder of its files.
      cases: draws them; true for those with M3's real shapes, which are large and not stored.
      define: outputs from inputs of any floating dtype, by the definitions alone. In float64 they are the truth.
      runs: the outputs as the package's users get them, in float32 and bfloat16.
      axes: letters of each tensor.
      tolerances: a name in `TOLERANCES` for each output.
      rounded: outputs that are stored as `define` gives them for bfloat16, too: with "_bf16" behind the name.
      on_host: True if `define` takes the inputs as numpy arrays and computes in float64 by itself.
      write_folder: writes what a case needs besides its file, at rule["model"] in the folder of all vectors.
    """

    name: str
    cases: Callable[[bool], Iterator[Case]]
    define: Callable[[Arrays, Rule], Arrays]
    runs: Callable[[Arrays, Rule], Iterator[Run]]
    axes: Mapping[str, str]
    tolerances: Mapping[str, str]
    rounded: tuple[str, ...] = ()
    on_host: bool = False
    write_folder: Callable[[Path, Case], None] | None = None

    def truth(self, inputs: Arrays, rule: Rule) -> dict[str, np.ndarray]:
        """Return the outputs by the definitions in float64."""
        if self.on_host:
            return on_host(self.define(inputs, rule))
        with jax.enable_x64(True):
            return jitted(self.define, rule, in_dtype(inputs, np.float64))

    def as_bfloat16(self, inputs: Arrays, rule: Rule) -> dict[str, np.ndarray]:
        """Return the outputs in `rounded` by the definitions in bfloat16, under the names that they are stored by."""
        if not self.rounded:
            return {}
        outputs = jitted(self.define, rule, in_dtype(inputs, jnp.bfloat16))
        return {f"{name}_bf16": outputs[name] for name in self.rounded if name in outputs}


def placed(rule: Rule, folder: Path) -> Rule:
    """Return a rule with the path of the model that it names, if it names one, as "folder"."""
    return dict(rule) | ({"folder": folder / rule["model"]} if "model" in rule else {})


def in_dtype(inputs: Arrays, dtype: DTypeLike) -> dict[str, Array]:
    """Return inputs on the device: bfloat16 ones as `dtype`, float32 ones as `dtype` but at least float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    target = {"bfloat16": dtype, "float32": wide}
    return {name: jnp.asarray(x).astype(target.get(str(x.dtype), x.dtype)) for name, x in inputs.items()}


def on_host(outputs: Arrays) -> dict[str, np.ndarray]:
    """Return outputs as numpy arrays, without those that are None."""
    return {name: np.asarray(x) for name, x in jax.device_get(dict(outputs)).items() if x is not None}


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Shaped[np.ndarray, "..."]:
    """Return normally distributed numbers, rounded to bfloat16."""
    return (rng.normal(size=shape) * scale).astype(jnp.bfloat16)


def jitted(function: Callable[..., Arrays], rule: Rule, inputs: Arrays) -> dict[str, np.ndarray]:
    """Run a function of (inputs, rule) as one compiled program, in which the rule is static."""
    return on_host(jax.jit(lambda inputs: function(inputs, rule))(dict(inputs)))
