"""Python functions as tools: parameters have the schemas of their annotations; what no call can reach is refused."""

import enum
import typing
from typing import Any, Literal, Optional

import pytest
from jsonschema import Draft202012Validator

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate, OutputParser
from m3jax.text.chat import ordered_tools
from m3jax.text.chat.functions import function_tool

TEMPLATE = ChatTemplate.from_folder(embedded_path())


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Mixed(enum.Enum):
    ONE, TWO, NONE = 1, "two", None


def lookup(key: str) -> str:
    """Return the value of a key.

    Args:
      key: a word

    Returns:
      Its value.
    """
    return {"harbor": "lantern"}[key]


def everything(
    a: int,
    b: float,
    c: Optional[str],  # noqa: UP045
    d: "list[str]",
    e: dict[str, float] | None = None,
    f: Literal["x", 1, None] = 1,
    g: tuple[int, str] = (1, "a"),
    h: int | str = 3,
    i: list[int | None] | dict[str, Any] = (),
    j: Any = None,
    k: typing.List = (),  # noqa: UP006
    l: list | tuple = (),  # noqa: E741
    *,
    m: Colour = Colour.RED,
    n: Mixed | bool | None = None,
    o: str = "tea",
    p: dict[str, list[tuple[int, int]]],
) -> Colour:
    """Take one of each,
    over two lines.

    And a second paragraph: with a colon.

    Args:
      a: one
      b: of two words:
        and a line more
      c: three
      d: é
      e: five

      f: six
      g: seven
      h: eight
      i: nine
      j: ten
      k: eleven
      l: twelve
      m: a colour
      n: fourteen
      o: what to drink (choices: ["tea", " coffee"])
      p: deep

    Raises:
      ValueError: never.
    """


class Library:
    def borrow(self, title: str, days: int = 7) -> bool:
        """Borrow a book.

        Args:
            title (str): the book
            days (int, optional): for how long
        """


@pytest.mark.parametrize("function", [lookup, everything], ids=lambda function: function.__name__)
def test_the_schema_is_the_one_that_transformers_makes(function):
    utils = pytest.importorskip("transformers.utils")
    theirs = utils.get_json_schema(function)
    theirs["function"].pop("return", None)
    assert function_tool(function, "tool 1") == theirs
    Draft202012Validator.check_schema(theirs["function"]["parameters"])


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (int | str, {"type": ["integer", "string"]}),
        (str | int | None, {"type": ["integer", "string"], "nullable": True}),
        (list | tuple, {"type": "array"}),
        (int | None, {"type": "integer", "nullable": True}),
        (int | Any, {"anyOf": [{"type": "integer"}, {}]}),
        (list[int] | str, {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}),
        (tuple[int, str], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["x", 1, "y"], {"type": ["string", "integer"], "enum": ["x", 1, "y"]}),
        (Colour, {"type": "string", "enum": [colour.value for colour in Colour]}),
    ],
    ids=str,
)
def test_the_schema_of_a_type_by_hand(hint, schema):
    def function(x):
        """Do it.

        Args:
            x: a word
        """

    function.__annotations__["x"] = hint
    found = function_tool(function, "tool 1")["function"]["parameters"]["properties"]["x"]
    assert found == schema | {"description": "a word"}


def test_a_function_is_the_tool_that_its_schema_is():
    """In a prompt and for the parser, which types the arguments by it; a method has no parameter `self`."""
    parameters = {"type": "object", "properties": {"key": {"type": "string", "description": "a word"}}}
    by_hand = {"name": "lookup", "description": "Return the value of a key.", "parameters": parameters}
    by_hand["parameters"]["required"] = ["key"]
    tools, messages = [{"type": "function", "function": by_hand}], [{"role": "user", "content": "Hi"}]
    assert ordered_tools([lookup]) == tools
    assert TEMPLATE.render(messages, tools=[lookup]) == TEMPLATE.render(messages, tools=tools)
    ns = "]<]minimax[>["
    written = "".join(f"{ns}<{name}>7{ns}</{name}>" for name in ("title", "days"))
    written = f'{ns}<tool_call>\n{ns}<invoke name="borrow">{written}{ns}</invoke>\n{ns}</tool_call>'
    (call,) = OutputParser(tools=[Library().borrow]).parse(written).tool_calls
    assert call.arguments == {"title": "7", "days": 7} and call.problems == ()
    assert list(ordered_tools([Library().borrow])[0]["function"]["parameters"]["required"]) == ["title"]


def described(x: bytes):
    """Do.

    Args:
      x: it
    """


def with_args(*numbers: int):
    """Do."""


def without_annotation(x):
    """Do."""


def without_docstring(x: int):
    pass


def without_description(x: int):
    """Do.

    Args:
      y: another
    """


def with_tuple(x: tuple[int, ...]):
    """Do.

    Args:
      x: it
    """


def with_choices(x: str):
    """Do.

    Args:
      x: it (choices: tea)
    """


def with_unknown(x: "Nowhere"):
    """Do.

    Args:
      x: it
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_args, r"tool 1 \(with_args\): \*numbers cannot be given by name"),
        (without_annotation, r"\(without_annotation\): x has no annotation"),
        (without_docstring, r"\(without_docstring\): it has no docstring"),
        (without_description, r"\(without_description\): x has no description: say under Args:"),
        (described, r"\(described\): x: the type <class 'bytes'> has no JSON schema"),
        (with_tuple, r"\(with_tuple\): x: the type tuple\[int, \.\.\.\] has no JSON schema"),
        (with_choices, r'write a JSON list, as in \(choices: \["tea"'),
        (with_unknown, "its annotations cannot be read .*Nowhere"),
        (Library.borrow, "self has no annotation"),
        (Library, "is no function"),
        (lambda: 1, "it has no docstring"),
    ],
)
def test_a_function_that_no_call_could_reach_is_refused_in_a_line(function, message):
    with pytest.raises(ValueError, match=message) as caught:
        ordered_tools([function])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
