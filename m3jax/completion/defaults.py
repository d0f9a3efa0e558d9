"""The decoding defaults of a model folder, read from its generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3jax.decoding.sampling import Sampling
from m3jax.files import current_file, read_json
from m3jax.messages import printable, shortened, shown

_MOST_STOP_IDS, _LARGEST_INTEGER = 4096, 2**31 - 1
# What the hub's file calls each knob. It knows no penalties of presence and frequency.
_KNOBS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "bad_words_ids": "bad_words"
}
_OTHERS = ("do_sample", "eos_token_id", "max_new_tokens")
# Keys that say nothing about how tokens are chosen.
_NEUTRAL = ("bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache")


@dataclass(frozen=True)
class Defaults:
    """The decoding settings of a model folder; what the folder does not set is off, not transformers' own default.

    Attributes:
      knobs: keyword arguments of `Sampling`; temperature is 0 where the folder says `do_sample: false`.
      stop_ids: EOS ids; None if the folder leaves them to config.json.
      max_new_tokens: None if the folder does not say.
      ignored: keys with a value that this package does not know.
    """

    knobs: Mapping[str, Any]
    stop_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Defaults":
        """Read a folder's generation_config.json; without the file nothing is set.

        Raises:
          ValueError: broken JSON, or a value outside its range; names the file.
        """
        if not Path(folder).is_dir():
            return cls({})
        file = current_file(Path(folder), "generation_config.json")
        if not file.is_file():
            return cls({})
        data = read_json(file, called="a generation config")
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(shortened(f"{printable(str(file))}: {error}")) from error

    @classmethod
    def from_dict(cls, data: object) -> "Defaults":
        """Read a parsed generation_config.json.

        Raises:
          ValueError: a value outside its range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a generation config is a JSON object, got {type(data).__name__}")
        given = {key: value for key, value in data.items() if value is not None}
        knobs = {knob: given[name] for name, knob in _KNOBS.items() if name in given}
        if not isinstance(given.get("do_sample", True), bool):
            raise ValueError(f"do_sample = {shown(given['do_sample'])}: must be true or false")
        if given.get("do_sample") is False:
            knobs["temperature"] = 0  # transformers' greedy decoding, whatever temperature stands beside it
        Sampling(**knobs)  # raises for a knob outside its range
        # JSON's true and false are Python's bool, which is an int.
        is_integer = lambda value: isinstance(value, int) and not isinstance(value, bool)
        is_count = lambda value: is_integer(value) and 0 <= value <= _LARGEST_INTEGER
        eos, max_new_tokens = given.get("eos_token_id"), given.get("max_new_tokens")
        stop_ids = eos if eos is None else tuple(eos if isinstance(eos, list) else [eos])
        if stop_ids is not None and not (len(stop_ids) <= _MOST_STOP_IDS and all(map(is_count, stop_ids))):
            raise ValueError(f"eos_token_id = {shown(eos)}: must be a token id, or at most {_MOST_STOP_IDS} of them")
        if max_new_tokens is not None and not (is_count(max_new_tokens) and max_new_tokens):
            raise ValueError(f"max_new_tokens = {shown(max_new_tokens)}: must be a positive integer of 32 bits")
        known = {*_KNOBS, *_OTHERS, *_NEUTRAL}
        return cls(
            knobs=knobs,
            stop_ids=stop_ids,
            max_new_tokens=max_new_tokens,
            ignored=tuple(sorted(given.keys() - known)),
        )
