"""The subjects of an evaluation: models with the ways they are computed, and the texts that they are given."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from m3jax.assets import embedded_path
from m3jax.cache import measure_scales
from m3jax.cache.storage import DTYPES, FLOAT8
from m3jax.checkpoint import load
from m3jax.config import M3Config
from m3jax.evaluate.perplexity import Text
from m3jax.evaluate.reading import Reading, Row
from m3jax.evaluate.sources import python_corpus
from m3jax.messages import printable, shown
from m3jax.model import M3
from m3jax.ops import check_backend
from m3jax.progress import activity
from m3jax.text import Tokenizer

MODEL_DTYPES = tuple(dtype for dtype in DTYPES if dtype != FLOAT8)
OF_THE_MODEL = "model"
_SCALE_TOKENS = 512  # of text, from which the scales of a float8 cache are measured


@dataclass(frozen=True)
class Subject:
    """A model and how it is computed.

    Attributes:
      folder: in the hub's layout; None is the embedded checkpoint.
      dtype: of weights and activations.
      kv_dtype: of cached keys and values; None is the model's.
      index_dtype: of cached index keys; None is the model's.
      backend: of `m3jax.ops.BACKENDS`.
    """

    folder: Path | None
    dtype: str
    kv_dtype: str | None
    index_dtype: str | None
    backend: str

    @property
    def path(self) -> Path:
        """The folder of the model."""
        return embedded_path() if self.folder is None else self.folder

    def settings(self) -> dict[str, str | None]:
        """Return the model's name and all settings, as a report has them."""
        name = "embedded" if self.folder is None else str(self.folder)
        types = {"kv_dtype": self.kv_dtype or self.dtype, "index_dtype": self.index_dtype or self.dtype}
        return {"model": name, "dtype": self.dtype, **types, "backend": self.backend}

    def load(self, mesh: Mesh | None) -> M3:
        """Load the model with this subject's dtype and backend.

        Args:
          mesh: the devices to shard it over.

        Raises:
          ValueError: a folder that cannot be used.
        """
        return load(self.path, dtype=self.dtype, mesh=mesh).with_backend(self.backend)

    def reading(self, model: M3, how: Reading, tokens: Int[np.ndarray, " T"]) -> Reading:
        """Return a reading with this subject's cache dtypes, and with measured scales if one of them is float8.

        Args:
          model: the loaded one.
          how: sizes.
          tokens: the beginning of which a float8 cache's scales are measured on.
        """
        scales = None
        if FLOAT8 in (self.kv_dtype, self.index_dtype):
            sample = jnp.asarray(tokens[None, :_SCALE_TOKENS], jnp.int32)
            with (
                activity(about=(model.config, self.dtype)) as line,
                line.timed("measuring the scales of a float8 cache"),
            ):
                scales = measure_scales(model, sample)
        return replace(how, kv_dtype=self.kv_dtype, index_dtype=self.index_dtype, scales=scales)


def subjects(
    folders: Sequence[Path | None], dtypes: str, kv_dtypes: str, index_dtypes: str, backends: str
) -> list[Subject]:
    """Return every model in every way that was asked for, after a check of all names.

    Args:
      folders: of models.
      dtypes, kv_dtypes, index_dtypes, backends: names with commas between them; "model" is a model's own dtype.

    Raises:
      ValueError: a path that is not a folder, or an unknown name.
    """
    for folder in folders:
        M3Config.from_pretrained(embedded_path() if folder is None else folder)
    asked = {}
    for option, text, allowed in (
        ("--dtype", dtypes, MODEL_DTYPES),
        ("--cache-dtype", kv_dtypes, (OF_THE_MODEL, *DTYPES)),
        ("--index-dtype", index_dtypes, (OF_THE_MODEL, *DTYPES)),
    ):
        asked[option] = [name.strip() for name in text.split(",")]
        if wrong := [name for name in asked[option] if name not in allowed]:
            raise ValueError(f"{option} {shown(wrong[0])}: choose of {', '.join(allowed)}, with commas between them")
    names = [name.strip() for name in backends.split(",")]
    for name in names:
        check_backend(name)
    own = lambda option: [None if name == OF_THE_MODEL else name for name in asked[option]]
    ways = itertools.product(folders, asked["--dtype"], own("--cache-dtype"), own("--index-dtype"), names)
    return [Subject(*way) for way in ways]


# Texts


def read_texts(names: Sequence[str]) -> dict[str, str]:
    """Return texts by the names of their files; without names, the held-out sources of the running Python's library.

    Args:
      names: of files in UTF-8, each once.

    Raises:
      ValueError: a file that cannot be read, is empty, or stands there twice.
    """
    if not names:
        return python_corpus("validation")
    texts = {}
    for name in names:
        try:
            text = Path(name).read_bytes().decode("utf-8")
        except OSError as error:
            raise ValueError(f"--text {printable(name)}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {printable(name)}: not UTF-8 text: byte {error.start} is wrong") from error
        if not text or name in texts:
            reason = "is empty" if not text else "is given twice"
            raise ValueError(f"--text {printable(name)}: {reason}; give each file once, with text in it")
        texts[name] = text
    return texts


def tokenised(tokenizer: Tokenizer, texts: dict[str, str], most: int) -> list[Text]:
    """Return the first tokens of some texts, each text with the BOS id before it if the tokenizer has one.

    Args:
      tokenizer: the model's.
      texts: by name.
      most: tokens of all together; the text that passes it is cut there, and those after it are left out.

    Raises:
      ValueError: fewer than two tokens.
    """
    chosen_texts = []
    for name, text in texts.items():
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        ids = [*begin, *tokenizer.encode(text)][: most - sum(len(each.tokens) for each in chosen_texts)]
        if len(ids) < 2:
            break
        spelled = tokenizer.decode(ids[1:], skip_special_tokens=False)
        chosen_texts.append(Text(name, np.array(ids, np.int32), len(spelled.encode())))
    if not chosen_texts:
        raise ValueError(
            f"the texts have fewer than 2 tokens, or --tokens {most} leaves fewer: there is nothing to predict"
        )
    return chosen_texts


def spread(texts: Sequence[Text], count: int, length: int) -> list[Row]:
    """Return pieces of the joined texts at evenly spaced places.

    Args:
      texts: the texts to cut the pieces from.
      count: the number of pieces.
      length: tokens of each piece.

    Raises:
      ValueError: a count or length below 1, or fewer tokens than one piece has.
    """
    tokens = np.concatenate([text.tokens for text in texts])
    if count < 1 or not 1 <= length <= len(tokens):
        raise ValueError(
            f"{count} pieces of {length} tokens: the texts have {len(tokens)} tokens; give at least 1 piece, and more "
            "text or shorter pieces"
        )
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return [tokens[start : start + length] for start in starts]


def each_loaded(subjects: Sequence[Subject], mesh: Mesh | None) -> Iterator[tuple[Subject, M3]]:
    """Yield every subject with its model; neighbours that differ only in cache or backend share the loaded weights.

    Args:
      subjects: neighbours of one folder and dtype share.
      mesh: the devices to shard the models over.
    """
    for _, group in itertools.groupby(subjects, key=lambda subject: (subject.folder, subject.dtype)):
        model = None
        for subject in group:
            model = subject.load(mesh) if model is None else model.with_backend(subject.backend)
            yield subject, model
