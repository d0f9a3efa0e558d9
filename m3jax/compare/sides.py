"""The two sides of a comparison: named arrays from files or from a run of a model, brought into one form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from m3jax.compare.dumps import read_dump
from m3jax.compare.layouts import Rows, aligned, cut
from m3jax.compare.names import Meaning, meanings
from m3jax.compare.quantities import Quantity, quantity
from m3jax.config import MOE, M3Config
from m3jax.messages import listed, printable, shown
from m3jax.vectors.files import MANIFEST, read_case, read_manifest

Tensor = Shaped[np.ndarray, "..."]
# Arrays that say which tokens the others have.
_TOKENS, _LENGTHS, _POSITIONS = ("tokens", "input_ids"), "lengths", "positions"


@dataclass(frozen=True)
class Source:
    """Arrays under an engine's own names and with its own axes, as a dump or a run gives them.

    Attributes:
      label: the user's argument for it.
      arrays: by the engine's names; a list of what each rank has.
      config: of the model that they come from, where that is known.
      skipped: names that are known and no quantities.
    """

    label: str
    arrays: Mapping[str, list[Tensor]]
    config: M3Config | None = None
    skipped: tuple[str, ...] = ()


class Value(NamedTuple):
    """One quantity's array, with its axes in the order that the quantity has.

    Attributes:
      array: [X ...].
      tokens: for each row, the index of its token among the side's.
    """

    array: Tensor
    tokens: Int[np.ndarray, " X"]


@dataclass(frozen=True)
class Side:
    """All quantities of one side.

    Attributes:
      label: as in `Source`.
      places: (prompt, position) of each token [X 2].
      values: by the quantity's name.
      dtype: the narrowest floating type among them, as tolerances know it.
      tokens: ids [X], where the dump has them.
      unknown: names that no table knows.
      has_some: True if it has an array of positions, so it may lack some tokens of its prompts.
    """

    label: str
    places: Int[np.ndarray, "X 2"]
    values: Mapping[str, Value]
    dtype: str
    tokens: Int[np.ndarray, " X"] | None = None
    unknown: tuple[str, ...] = ()
    has_some: bool = False


def from_files(path: str) -> Source:
    """Read a dump, or, from a folder of golden vectors, the values of its whole tiny model.

    Raises:
      ValueError: as `read_dump` and `read_manifest`, or golden vectors without a model.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        return Source(path, {name: stored.ranks for name, stored in read_dump(folder).items()})
    cases = [case for case in read_manifest(folder)["cases"] if case["group"] == "model"]
    if not cases:
        raise ValueError(f"{printable(path)}: golden vectors without a case of the group model")
    arrays, changed = read_case(folder, cases[0])
    if changed:
        raise ValueError(f"{printable(path)}: {changed}; make the vectors again")
    config = M3Config.from_pretrained(folder / cases[0]["model"])
    skipped = tuple(name for name in arrays if name.endswith(("last_kept", "first_dropped")))
    return Source(path, {name: [array] for name, array in arrays.items()}, config, skipped)


def prompts_in(source: Source) -> list[list[int]] | None:
    """Return the token ids of a dump's prompts; None without ids, or where positions may leave some tokens out."""
    if (ids := _ids(source)) is None or _POSITIONS in source.arrays:
        return None
    lengths = _lengths(source, ids)
    if ids.ndim == 1:
        ends = np.cumsum(lengths if lengths is not None else [len(ids)])
        return [part.tolist() for part in np.split(ids, ends[:-1])]
    counts = lengths if lengths is not None else np.full(len(ids), ids.shape[1])
    return [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]


def side(
    source: Source, config: M3Config | None, lengths: Sequence[int] | None, user_map: Mapping[str, Meaning | None]
) -> Side:
    """Return a source's arrays as quantities with aligned axes.

    Args:
      source: arrays with the engine's names and axes.
      config: of the model whose sizes the arrays have; None where it is not known.
      lengths: of the prompts, where the source does not say it itself.
      user_map: names that the user gave.

    Raises:
      ValueError: no name is known, or an array that cannot be aligned; names the source.
    """
    where = printable(source.label)
    aside = {*_TOKENS, _LENGTHS, _POSITIONS, *source.skipped}
    names = [name for name in source.arrays if name not in aside]
    known = meanings(names, user_map)
    if not known:
        first_names = listed([shown(name) for name in names[:4]], ", ")
        raise ValueError(
            f"{where}: no name of a quantity among its {len(names)} arrays ({first_names}); --map FILE gives names"
        )
    dumped, ids = _rows(source, known, lengths)
    values: dict[str, Value] = {}
    for name, meaning in known.items():
        try:
            for part, ranks in _parts(name, meaning, source.arrays[name], config).items():
                if part not in values:  # a layer's output is also the next module's input; the first name counts
                    values[part] = _value(quantity(part), ranks, dumped, config, meaning.axes)
        except ValueError as error:
            raise ValueError(f"{where}: {shown(name)}: {error}") from None
    unknown = tuple(name for name in names if name not in known)
    dtypes = [value.array.dtype for value in values.values()]
    return Side(source.label, dumped.places, values, _narrowest(dtypes), ids, unknown, _POSITIONS in source.arrays)


def sizes(config: M3Config | None, layer: int | None) -> dict[str, int]:
    """Return the lengths of a model's axes by letter; W, the MLP's hidden width, only for a given layer."""
    if config is None:
        return {}
    axis_sizes = {
        "D": config.hidden_size, "N": config.num_attention_heads, "K": config.num_key_value_heads,
        "H": config.head_dim, "I": config.index_head_dim, "E": config.num_local_experts,
        "A": config.num_experts_per_tok, "V": config.vocab_size,
    }  # fmt: skip
    if layer is not None and layer < config.num_hidden_layers:
        is_moe = config.mlp_layer_types[layer] == MOE
        axis_sizes["W"] = config.shared_intermediate_size if is_moe else config.dense_intermediate_size
    return axis_sizes


def _parts(name: str, meaning: Meaning, ranks: list[Tensor], config: M3Config | None) -> dict[str, list[Tensor]]:
    """Return the quantities in one array by name, each as the ranks have it; a fused projection has several."""
    parts = [quantity(part) for part in meaning.names]
    if any(part is None for part in parts):
        raise ValueError(f"it would be {meaning.names[0]}, which is no quantity")
    if len(parts) == 1:
        return {parts[0].name: ranks}
    letters = sizes(config, parts[0].layer)
    if not {letter for part in parts for letter in part.axes[1:]} <= letters.keys():
        if len(parts) != 2 or parts[0].axes != parts[1].axes or ranks[0].shape[-1] % 2:
            raise ValueError(f"it holds {len(parts)} quantities, and --config FOLDER says where to cut")
        return {part.name: [np.split(array, 2, axis=-1)[i] for array in ranks] for i, part in enumerate(parts)}
    # In a layer of dense attention the fused projection has no part for the index branch.
    for some in (parts, [part for part in parts if "index" not in part.kind]):
        if some and (pieces := cut(some, ranks, letters)) is not None:
            return pieces
    kinds = " and ".join(part.kind for part in parts)
    raise ValueError(f"{ranks[0].shape[-1]} columns are not {kinds} of this model on {len(ranks)} ranks")


def _value(wanted: Quantity, ranks: list[Tensor], dumped: Rows, config: M3Config | None, axes: str | None) -> Value:
    """Return one quantity with its axes aligned; logits may be those of each prompt's last token alone."""
    letters = sizes(config, wanted.layer)
    if wanted.kind in ("blocks", "expert_ids") and ranks[0].dtype.kind not in "iu":
        raise ValueError(f"ids of dtype {ranks[0].dtype}; dump them as integers")
    everyone = np.arange(len(dumped.places))
    prompts = len(dumped.is_token)
    if wanted.kind == "logits" and ranks[0].ndim == 2 and len(ranks[0]) == prompts != len(everyone):
        last = np.cumsum(dumped.is_token.sum(1)) - 1
        last_tokens = Rows(np.ones((prompts, 1), bool), dumped.places[last])
        return Value(aligned(wanted, ranks, last_tokens, letters), last)
    return Value(aligned(wanted, ranks, dumped, letters, axes), everyone)


def _rows(
    source: Source, known: Mapping[str, Meaning], lengths: Sequence[int] | None
) -> tuple[Rows, Int[np.ndarray, " X"] | None]:
    """Return the tokens that a source's arrays have, and their ids where it stores them."""
    ids = _ids(source)
    positions = _integers(source, _POSITIONS)
    counts = _lengths(source, ids)
    if positions is not None and positions.ndim == 2:
        is_token = positions >= 0
        places = np.stack([np.nonzero(is_token)[0], positions[is_token]], axis=1)
    elif positions is not None:
        # A position that is not above the one before it begins another prompt.
        prompt = np.cumsum(np.concatenate([[0], (np.diff(positions) <= 0).astype(int)]))
        places = np.stack([prompt, positions], axis=1)
        is_token = _padded(np.bincount(prompt))
    else:
        if counts is None and ids is not None and (ids.ndim == 2 or lengths is None or sum(lengths) != len(ids)):
            counts = np.full(len(ids), ids.shape[1]) if ids.ndim == 2 else np.array([len(ids)])
        counts = counts if counts is not None else lengths if lengths is not None else _guessed(source, known)
        is_token = _padded(counts)
        places = np.argwhere(is_token)
    if ids is not None:
        ids = ids[:, : is_token.shape[1]][is_token] if ids.ndim == 2 else ids
        if len(ids) != len(places):
            raise ValueError(f"{printable(source.label)}: {len(ids)} tokens, and lengths or positions of {len(places)}")
    return Rows(is_token, places), ids


def _padded(counts: Sequence[int] | Int[np.ndarray, " B"]) -> Bool[np.ndarray, "B T"]:
    """Return a mask of rows padded on the right: True at tokens, False at padding."""
    return np.arange(max(counts, default=0)) < np.asarray(counts, int)[:, None]


def _guessed(source: Source, known: Mapping[str, Meaning]) -> list[int]:
    """Return the prompts' lengths by the shape of an array of the residual stream: [B T D], or [X D] of one prompt."""
    for name, meaning in known.items():
        first_part = quantity(meaning.names[0])
        shape = source.arrays[name][0].shape
        if first_part is not None and first_part.axes == ("X", "D") and len(shape) in (2, 3):
            return [shape[0]] if len(shape) == 2 else [shape[1]] * shape[0]
    raise ValueError(
        f"{printable(source.label)}: nothing says how many tokens each prompt has; dump the ids as tokens [B T], or "
        "give --prompt-tokens"
    )


def _ids(source: Source) -> Tensor | None:
    """Return the token ids of a source, [B T] or [X]; None if it has none."""
    return next((ids for name in _TOKENS if (ids := _integers(source, name)) is not None), None)


def _lengths(source: Source, ids: Tensor | None) -> Int[np.ndarray, " B"] | None:
    """Return the prompts' lengths that a source stores; None if it stores none."""
    lengths = _integers(source, _LENGTHS)
    if lengths is None:
        return None
    room = ids.shape[1] if ids is not None and ids.ndim == 2 else None
    fits = lengths.ndim == 1 and (lengths >= 0).all() and (room is None or (lengths <= room).all())
    if not fits or (ids is not None and len(lengths) != len(ids) and room is not None):
        where, shape = printable(source.label), None if ids is None else list(ids.shape)
        raise ValueError(f"{where}: lengths {shown(lengths.tolist())} of tokens of shape {shape}")
    return lengths


def _integers(source: Source, name: str) -> Tensor | None:
    """Return a source's integer array about its tokens (ids, lengths or positions); None if it has none."""
    if name not in source.arrays:
        return None
    array = np.asarray(source.arrays[name][0])
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise ValueError(
            f"{printable(source.label)}: {name} is {array.dtype} {list(array.shape)}; dump ids as [B T] or [X]"
        )
    return array.astype(np.int64)


def _narrowest(kinds: Sequence[np.dtype]) -> str:
    """Return the narrowest floating type by the tolerances' names: all narrower than float32 count as bfloat16."""
    widths = [min(kind.itemsize, 8) for kind in kinds if kind.kind not in "iub"]
    narrowest = min(widths, default=4)
    return {8: "float64", 4: "float32"}.get(narrowest, "bfloat16")
