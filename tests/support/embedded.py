"""The tokenizer of the embedded checkpoint, read once for all tests of a process; nothing changes it."""

from m3jax.assets import embedded_path
from m3jax.text import Tokenizer

TOKENIZER = Tokenizer.from_pretrained(embedded_path())
