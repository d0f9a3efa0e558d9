"""Arguments of a command that may be one of several processes, as its parser gives them."""

from argparse import Namespace

from m3jax.console import Parser
from m3jax.hosts.arguments import add_hosts

ONE = ("--coordinator", "127.0.0.1:1", "--num-processes", "1", "--process-id", "0")


def arguments(*words: str) -> Namespace:
    """Parse words as a command does that has a model, a draft and a mesh."""
    parser = Parser("m3jax.test", "for a test")
    for name in ("--mesh", "--model", "--draft"):
        parser.add_argument(name)
    add_hosts(parser)
    return parser.parse_args(words)
