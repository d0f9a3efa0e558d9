"""Matching of a folder's tensors with those that a model needs; every misfit is found before a weight is read."""

import logging
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from m3jax.checkpoint import mxfp8, names
from m3jax.checkpoint.reader import FLOATS, CheckpointError, Folder, StoredTensor, read_folder, version
from m3jax.config import M3Config, read_config
from m3jax.messages import printable
from m3jax.vision import VisionConfig

_LOG = logging.getLogger("m3jax.checkpoint")
_FP8 = "F8_E4M3"
_SCALE_DTYPES = ("U8", "F8_E8M0")
# Up to so many tensors, each that is missing gets a line of its own. M3 has 22,893.
_LISTED = 100_000
_A_FLOAT = f"{', '.join(FLOATS[:-1])} or {FLOATS[-1]}"


class Source(NamedTuple):
    """The source of one hub tensor: a stored weight, its scale if it has one, and the tensor's part of both."""

    weight: StoredTensor
    scale: StoredTensor | None
    part: names.Part

    def read(self) -> tuple[Shaped[np.ndarray, "out *in"], UInt8[np.ndarray, "out scales"] | None]:
        """Return views of the hub tensor's weight [out, in] or [out], and of its scales [out, in/32] if it has them."""
        return self._part_of(self.weight), None if self.scale is None else self._part_of(self.scale)

    def _part_of(self, stored: StoredTensor) -> Shaped[np.ndarray, "out *in"]:
        """Return the hub tensor within a stored one, which may hold all experts, and gate and up together."""
        array = stored.view()  # of merged experts: [E 2*F D]
        if self.part.expert is not None:
            array = array[self.part.expert]  # [2*F D]
        return array if self.part.rows is None else array[slice(*self.part.rows)]  # [F D]


@dataclass(frozen=True)
class Plan:
    """A checkpoint that fits: its configuration, and each hub tensor's place and source by name.

    `vision` and `mtp` are the names of stored tensors that are not loaded; without the tower the configuration has no
    `vision_config`.
    """

    config: M3Config
    targets: dict[str, names.Target]
    sources: dict[str, Source]
    vision: tuple[str, ...]
    mtp: tuple[str, ...]


def make_plan(path: str | Path, vision: bool | None = None) -> Plan:
    """Match a hub folder's headers with its configuration.

    Args:
      path: a folder with config.json and safetensors files.
      vision: whether to load the tower; None loads it where config.json describes one and the files hold any of it.

    Raises:
      CheckpointError: no such folder, or a line for every missing, unexpected, mis-shaped, wrongly
        typed, doubled or badly scaled tensor, and for every absent or damaged file; or one line where config.json
        describes far more than the files hold.
      ValueError: config.json is missing, broken, or describes another model.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(path, ["no such folder; give one in the hub's layout"])
    before = version(path)
    config, raw_config = read_config(path)
    folder = read_folder(path)
    if version(path) != before:
        raise CheckpointError(path, ["replaced by a save while it was read; load again"])
    config = _with_or_without_tower(path, config, folder, vision)
    _check_size(path, config, folder)
    match = _Match(config, folder, mxfp8.check_config(raw_config))
    if match.problems:
        raise CheckpointError(path, match.problems)
    if match.vision:
        _LOG.info("%s: %d vision tensors are kept aside, not loaded", path, len(match.vision))
    elif raw_config.get("vision_config") is not None and config.vision_config is None and vision is None:
        _LOG.warning("%s: config.json describes a vision tower and no file holds it: the model takes text alone", path)
    if match.mtp:
        _LOG.info("%s: %d mtp.* tensors are skipped", path, len(match.mtp))
    return Plan(config, match.targets, match.sources, tuple(match.vision), tuple(match.mtp))


def _with_or_without_tower(path: Path, config: M3Config, folder: Folder, vision: bool | None) -> M3Config:
    """Return the configuration of the model to load: without `vision_config` where the tower is left out."""
    if vision and config.vision_config is None:
        raise CheckpointError(path, ["config.json: no vision_config: this model has no tower; load with vision=False"])
    if vision is None:
        vision = any(map(names.is_vision, folder.tensors.keys() | folder.lost))
    if not vision:
        return replace(config, vision_config=None)
    if config.vision_config is not None:
        try:
            VisionConfig.of(config)
        except ValueError as error:
            error.args = (f"{printable(str(path))}: {error}; load with vision=False for the text model alone",)
            raise
    return config


def _check_size(path: Path, config: M3Config, folder: Folder) -> None:
    """Raise CheckpointError if config.json describes over 100,000 tensors and more values than the files hold."""
    num_tensors, num_values = names.totals(config)
    held_values = sum(prod(tensor.shape) for tensor in folder.tensors.values())
    if num_tensors > _LISTED and num_values > held_values:
        fault = (
            f"config.json describes {num_tensors:,} tensors of {num_values:,} values, the files hold "
            f"{len(folder.tensors):,} of {held_values:,}: give the config.json of these weights"
        )
        raise CheckpointError(path, [fault, *folder.problems])


class _Match:
    """The sources of a folder's hub tensors, and every fault of the folder."""

    def __init__(self, config: M3Config, folder: Folder, quantization: tuple[bool, list[str]]):
        self.targets = names.targets(config)
        self.entries = names.entries(config, self.targets)
        self.has_tower = config.vision_config is not None
        self.is_quantized, config_problems = quantization
        self.problems = [*folder.problems, *config_problems]
        self.vision: list[str] = []
        self.mtp: list[str] = []
        self.sources: dict[str, Source] = {}
        # By canonical name: a weight and its scale have the same.
        self.weights: dict[str, StoredTensor] = {}
        self.scales: dict[str, StoredTensor] = {}
        self.lost = {names.canonical(name) for name in folder.lost}
        for name in sorted(folder.tensors):
            self._place(folder.tensors[name])
        for name, weight in self.weights.items():
            self._check_weight(name, weight)
        self._check_scales()
        if not folder.all_lost:
            self._check_missing()

    def _place(self, stored: StoredTensor) -> None:
        """Put a stored tensor among the weights, the scales, or what is not loaded."""
        if names.is_mtp(stored.name):
            self.mtp.append(stored.name)
            return
        if names.is_vision(stored.name) and not self.has_tower:
            self.vision.append(stored.name)
            return
        name, is_scale = names.canonical(stored.name)
        same_kind = self.scales if is_scale else self.weights
        if name not in self.entries or (is_scale and not self._is_quantizable(name)):
            self._fault(stored, f"unexpected, found {stored}")
        elif name in same_kind:
            self._fault(stored, f"the same tensor as {same_kind[name].name}, keep one")
        else:
            same_kind[name] = stored

    def _is_quantizable(self, name: str) -> bool:
        return self.targets[self.entries[name].parts[0].name].quantizable

    def _fault(self, stored: StoredTensor, message: str) -> None:
        self.problems.append(f"{stored.name}: {message}")

    def _check_weight(self, name: str, weight: StoredTensor) -> None:
        """Compare a weight with what a file may hold under its name, and make it the source of its hub tensors."""
        entry, scale = self.entries[name], self.scales.get(name)
        if weight.shape != entry.shape:
            self._fault(weight, f"expected shape {list(entry.shape)}, found {weight}")
        if weight.dtype == _FP8 and self._is_quantizable(name):
            if scale is None and (name, True) not in self.lost:
                self._fault(weight, f"{_FP8} without a scale, expected {names.scale_name(weight.name)}")
        elif scale is not None:
            self._fault(weight, f"expected {_FP8} because {scale.name} is there, found {weight}")
        elif weight.dtype not in FLOATS:
            self._fault(weight, f"expected {_A_FLOAT}, found {weight}")
        for part in entry.parts:
            other = self.sources.setdefault(part.name, Source(weight, scale, part)).weight
            if other is not weight:
                self._fault(weight, f"holds {part.name}, which {other.name} holds too, keep one")

    def _check_scales(self) -> None:
        """Check each scale's weight, shape, dtype and bytes, and that config.json announces MXFP8 where it is used."""
        for name, scale in self.scales.items():
            *lead_sizes, channels = self.entries[name].shape
            expected = (*lead_sizes, -(-channels // mxfp8.BLOCK))
            if name not in self.weights and (name, False) not in self.lost:
                self._fault(scale, "a scale without its weight")
            if scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
                self._fault(scale, f"expected U8 {list(expected)}, found {scale}")
            elif nan_count := int(np.count_nonzero(scale.view() == mxfp8.NAN_SCALE)):
                self._fault(scale, f"{nan_count} of its scales are NaN (byte {mxfp8.NAN_SCALE})")
        fp8_count = sum(weight.dtype == _FP8 for weight in self.weights.values())
        if fp8_count and not self.is_quantized:
            self.problems.append(f"config.json: no quantization_config, but {fp8_count} weights are {_FP8}")

    def _check_missing(self) -> None:
        """Add a problem for each hub tensor that no stored one holds, except those of a reported file."""
        lost_names = {
            part.name
            for name, is_scale in self.lost
            if not is_scale and name in self.entries
            for part in self.entries[name].parts
        }
        self.problems += [
            f"{name}: missing, expected {list(target.hub_shape)}"
            for name, target in self.targets.items()
            if name not in self.sources and name not in lost_names
        ]
