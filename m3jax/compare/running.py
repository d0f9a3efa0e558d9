"""From two arguments of a command line to a report: read the dumps, run the models, and compare the two sides."""

from collections.abc import Sequence
from pathlib import Path

from m3jax.compare.live import run_m3jax, run_transformers
from m3jax.compare.names import read_map
from m3jax.compare.report import Report, compare
from m3jax.compare.sides import Source, from_files, prompts_in, side
from m3jax.config import M3Config
from m3jax.progress import activity

_LIVE = ("m3jax", "transformers")


def compare_sides(
    a: str,
    b: str,
    prompts: Sequence[Sequence[int]] = (),
    *,
    rtol: float | None = None,
    atol: float | None = None,
    names: Path | None = None,
    config: str | Path | None = None,
    dtype: str = "float32",
    mesh: str | None = None,
) -> Report:
    """Read or run `a` and `b`, and compare `b` with the reference `a`.

    Args:
      a: the reference: a file or folder of arrays, "m3jax:FOLDER" or "transformers:FOLDER".
      b: the side in question, in one of the same forms.
      prompts: token ids for a model that runs live; those of the other side's dump by default.
      rtol: of every number; by default that of the narrower dtype.
      atol: likewise.
      names: a file of names, as `read_map` reads it.
      config: the model's folder, where neither side has it.
      dtype: of models that run live.
      mesh: for m3jax, as in `m3jax.load`.

    Returns:
      The report.

    Raises:
      ValueError: a side that cannot be read, run or aligned; the message says which and why.
    """
    user_map = {} if names is None else read_map(names)
    given = [list(prompt) for prompt in prompts]
    with activity(about=([*map(len, given)], dtype, mesh)) as line:
        dumps: list[Source | None] = []
        for label in (a, b):
            engine = _engine(label)
            line.say(f"reading {label}")
            dumps.append(None if engine else from_files(label))
        known = given or next(
            (prompts_of_dump for dump in dumps if dump is not None and (prompts_of_dump := prompts_in(dump))), None
        )
        sources = []
        for label, dump in zip((a, b), dumps, strict=True):
            if dump is None and known is None:
                raise ValueError(f"{label}: which prompts? give --prompt-tokens, or a dump that has its tokens [B T]")
            if dump is None:
                engine, _, folder = label.partition(":")
                if engine == "m3jax":
                    with line.timed(f"compiling and running {label}"):
                        dump = run_m3jax(label, folder, known, dtype, mesh)
                else:
                    with line.timed(f"running {label}"):
                        dump = run_transformers(label, folder, known, dtype)
            sources.append(dump)
        of_model = None if config is None else M3Config.from_pretrained(config)
        of_model = next((each for each in (of_model, *(source.config for source in sources)) if each is not None), None)
        lengths = None if known is None else [len(prompt) for prompt in known]
        sides = [side(source, of_model, lengths, user_map) for source in sources]
        with line.timed(f"comparing {a} with {b}"):
            return compare(*sides, of_model, rtol, atol)


def _engine(label: str) -> str | None:
    """Return the engine of a label such as "m3jax:FOLDER", a model to run live; None for files."""
    engine, colon, _ = label.partition(":")
    return engine if colon and engine in _LIVE else None
