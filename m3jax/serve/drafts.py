"""The options of a draft on the command lines of a server; this module imports nothing large."""

import argparse

from m3jax.cli import DRAFT_TOKENS, MAX_DRAFT_TOKENS


def add_draft(out: argparse._ActionsContainer) -> None:
    """Add the options of a draft, which are those of `python -m m3jax.generate`."""
    out.add_argument("--draft", metavar="DIR", help="draft tokens with an EAGLE3 model: its folder, or builtin for the "
                     "embedded checkpoint's; ngram looks for them in the text so far")  # fmt: skip
    out.add_argument("--draft-tokens", metavar="K", type=int, help=f"1 to {MAX_DRAFT_TOKENS} in one verification "
                     f"(default: {DRAFT_TOKENS})")  # fmt: skip


def check_draft(args: argparse.Namespace) -> None:
    """Raise ValueError for a number of draft tokens that no engine has; where none is given it is the default."""
    if args.draft_tokens is not None and args.draft is None:
        raise ValueError("--draft-tokens needs --draft: name what proposes them (a folder, builtin or ngram)")
    if args.draft_tokens is None:
        args.draft_tokens = DRAFT_TOKENS
    if not 1 <= args.draft_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(f"--draft-tokens {args.draft_tokens}: give 1 to {MAX_DRAFT_TOKENS}")
