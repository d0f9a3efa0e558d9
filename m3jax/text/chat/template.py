"""A checkpoint's chat template: jinja2 in a sandbox, with the settings that templates of the hub are written for."""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from m3jax.files import current_file, read_bytes
from m3jax.messages import printable, shortened, shown
from m3jax.text.chat.request import ordered_messages, ordered_tools
from m3jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

_LOG = logging.getLogger("m3jax.text")
FILE_NAME = "chat_template.jinja"
_MOST_BYTES = 1 << 20  # M3's has 11,756
_MOST_CHARACTERS = 64 << 20  # of a text; a million tokens are some 5 million
_MOST_SECONDS = 60.0  # of a rendering, which takes milliseconds
_CHECK = "0check"  # no template can write this name, so none can give it another meaning

# Variables that other libraries pass from the tokenizer's settings; jinja renders one that is not passed as "".
_TOKEN_VARIABLES = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})


class ChatTemplate:
    """A checkpoint's chat template, which renders a conversation as the text that the model was trained to read.

    The request is put in order first (`ordered_messages`), so that what the template would leave out in silence is an
    error. The template is code from the checkpoint's author, so it runs in jinja2's immutable sandbox, and rendering
    ends with an error after 60 seconds or 64 Mi characters, as far as `_with_checks` sees them.

    Args:
        source: the template as text.
        name: the name for it in errors.

    Raises:
        ValueError: jinja2 is not installed, or the text is no template.

    Example:
        template = ChatTemplate.from_folder("MiniMax-M3")
        prompt = template.encode(tokenizer, [{"role": "user", "content": "Hello"}], thinking_mode="enabled")
    """

    def __init__(self, source: str, name: str = "the chat template"):
        self.source = source
        self.name = printable(name)
        self._compiled, self._variables = _compiled(source, self.name)

    def __reduce__(self):
        """Pickle the source and the name alone; the process that unpickles compiles the template again."""
        return ChatTemplate, (self.source, self.name)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ChatTemplate":
        """Read a checkpoint's chat_template.jinja.

        Args:
            folder: a folder in the hub's layout.

        Returns:
            Its template.

        Raises:
            ValueError: no such folder, no template in it, or as `from_file`.
        """
        folder = Path(folder)
        shown_folder = printable(str(folder))
        if not folder.is_dir():
            raise ValueError(f"{shown_folder} is not a folder; give one that holds {FILE_NAME}")
        file = current_file(folder, FILE_NAME)
        if not file.is_file():
            raise ValueError(f"{shown_folder} has no {FILE_NAME}; copy the checkpoint's own there")
        return cls.from_file(file)

    @classmethod
    def from_file(cls, file: str | Path) -> "ChatTemplate":
        """Read a template from a file.

        Args:
            file: jinja2, in UTF-8.

        Returns:
            The template.

        Raises:
            ValueError: no such file, larger than 1 MiB, not UTF-8, no template, or jinja2 is not installed.
        """
        return cls(cls.read_source(file), str(file))

    @staticmethod
    def read_source(file: str | Path) -> str:
        """Return the text of a template's file, which is not compiled yet.

        Args:
            file: jinja2, in UTF-8.

        Raises:
            ValueError: no such file, larger than 1 MiB, or not UTF-8.
        """
        shown_file = printable(str(file))
        try:
            return read_bytes(Path(file), _MOST_BYTES).decode("utf-8")
        except OSError as error:
            raise ValueError(f"{shown_file}: {error.strerror}; give the file of a chat template") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{shown_file}: byte {error.start} is not UTF-8; download the template again") from None

    def render(
        self,
        messages: Any,
        tools: Any = None,
        thinking_mode: Any = "adaptive",
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Make the text of a conversation.

        Args:
            messages: a list of messages, as `ordered_messages` takes them.
            tools: a list of tools or of Python functions, as `ordered_tools` takes them, or None.
            thinking_mode: "adaptive", "enabled" or "disabled" for M3; another text goes to the template, which M3's own
                then leaves unmentioned. None is not passed on.
            add_generation_prompt: end where the assistant begins to write.
            **kwargs: other variables of the template; M3's reads `model_identity`.

        Returns:
            The text, special tokens written out.

        Raises:
            ValueError: messages or tools that cannot be put in order, a variable that the template does not read, or
                the template failed, or took too long, or made too long a text.
        """
        if thinking_mode is not None and not isinstance(thinking_mode, str):
            raise ValueError(f"thinking_mode = {shown(thinking_mode)}: must be a text such as 'adaptive', or None")
        ordered = ordered_messages(messages)
        if len(ordered) < len(messages):
            _LOG.warning("system and developer messages behind the first message are not shown to the model")
        variables = {
            **kwargs,
            "messages": ordered,
            "tools": ordered_tools(tools) or None,
            "add_generation_prompt": bool(add_generation_prompt),
            **({} if thinking_mode is None else {"thinking_mode": thinking_mode}),
        }
        self._check_variables(kwargs, variables)
        try:
            return _rendered(self._compiled, variables)
        except RecursionError:
            reason = "it calls itself without an end, or arguments nest too deep"
        except Exception as error:  # the template's own, of any kind: it is a program
            reason = str(error) or type(error).__name__
        raise ValueError(shortened(f"{self.name} cannot render this conversation: {printable(reason)}"))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Any,
        tools: Any = None,
        thinking_mode: Any = "adaptive",
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Make the token ids of a conversation; the template writes the special tokens, no others are added.

        Args:
            tokenizer: the checkpoint's.
            messages, tools, thinking_mode, add_generation_prompt, kwargs: as in `render`.

        Returns:
            The ids.

        Raises:
            ValueError: as `render`, or a text that holds a lone surrogate, or that ends with the beginning of a special
                token which the next one completes.
        """
        return self.encode_rendered(
            tokenizer, self.render(messages, tools, thinking_mode, add_generation_prompt, **kwargs)
        )

    @staticmethod
    def encode_rendered(tokenizer: Tokenizer, text: str) -> list[int]:
        """Make the token ids of what `render` returned, as `encode` does.

        Args:
            tokenizer: the checkpoint's.
            text: of a whole conversation.

        Raises:
            ValueError: as `encode`.
        """
        ids = tokenizer.encode(text)
        _check_tokens(tokenizer, text, ids)
        return ids

    def _check_variables(self, kwargs: dict[str, Any], variables: dict[str, Any]) -> None:
        """Raise ValueError for a given variable that the template never reads, or a token variable that it lacks."""
        unread = sorted(kwargs.keys() - self._variables)
        if variables["tools"] and "tools" not in self._variables:
            unread.append("tools")
        if variables.get("thinking_mode", "adaptive") != "adaptive" and "thinking_mode" not in self._variables:
            unread.append("thinking_mode")
        if unread:
            read = ", ".join(sorted(self._variables)) or "what is in it"
            raise ValueError(shortened(f"{self.name} does not read {', '.join(map(printable, unread))}, only {read}"))
        if lacking := sorted((_TOKEN_VARIABLES & self._variables) - variables.keys()):
            raise ValueError(f"{self.name} reads {lacking[0]}, which is not in it: render(..., {lacking[0]}='...')")


def _check_tokens(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    """Raise ValueError if a special token that the template wrote is not among the ids.

    A user's text that ends in "]<]minimax[>" runs into the "[e~[" that ends the turn: they are tokenised as
    "]<]minimax[>[" and "e~[", so the turn would have no end.
    """
    added = {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    places = {content: re.findall(f"(?={re.escape(content)})", text) for content in added if content in text}
    written = {content: len(found) for content, found in places.items()}
    read = Counter(ids)
    for content, count in written.items():
        is_part = any(content in other for other in written if other != content)
        if not is_part and read[added[content]] != count:
            raise ValueError(
                f"{count} {printable(content)} are written and {read[added[content]]} are read: a text ends with the "
                "beginning of a special token, such as ]<]minimax[>, and runs into the next one; end it otherwise"
            )


@lru_cache(maxsize=8)
def _compiled(source: str, name: str) -> tuple["jinja2.Template", frozenset[str]]:
    """Return a template ready to render, and the names of the variables that it reads.

    It is cached because compiling takes some 25 ms, each call of `m3jax.chat` needs one, and rendering keeps no state.
    """
    try:
        import jinja2
        import jinja2.ext
        import jinja2.meta
        import jinja2.nodes
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise ValueError("a chat template needs jinja2, which is not installed: pip install 'm3jax[chat]'") from None

    class Generation(jinja2.ext.Extension):
        """The block {% generation %}, by which transformers finds what the assistant wrote: its text is unchanged."""

        tags = frozenset({"generation"})

        def parse(self, parser: "jinja2.parser.Parser") -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, in which no product, format, padding or replacement makes a value that is too long."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_step(operator, left, right)
            return super().call_binop(context, operator, left, right)

        # Underscores, so that no keyword of what is called can have the same names.
        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
            if isinstance(owner := getattr(method, "__self__", None), str):
                _check_step(method.__name__, owner, *args, *kwargs.values())
            return super().call(__context, __obj, *args, **kwargs)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
    del environment.globals["lipsum"]  # it writes as many paragraphs as it is asked for
    for step in {"center", "format", "indent", "join", "replace"}:
        environment.filters[step] = _checked_filter(step, environment.filters[step])

    def raise_exception(message: object) -> NoReturn:
        raise jinja2.TemplateError(str(message))

    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    try:
        tree = environment.parse(source)
        # jinja2 names a variable too that a template sets in one branch, though it has always set it before.
        found = jinja2.meta.find_undeclared_variables(tree) - environment.globals.keys()
        read = frozenset(name for name in found if _first_use(tree, name) == "load")
        return environment.from_string(_with_checks(tree)), read
    except jinja2.TemplateSyntaxError as error:
        reason = printable(f"line {error.lineno}: {error.message}")
    except RecursionError:
        reason = "its expressions nest too deep"
    raise ValueError(shortened(f"{name} is no template: {reason}"))


def _first_use(node: "jinja2.nodes.Node", name: str) -> str | None:
    """Return "load" if a part of a template can read a variable before it has set it, "store" if it sets it first.

    Returns:
        None if it need not do either, or sets the variable for itself alone.
    """
    from jinja2 import nodes

    def first(parts: Iterable[nodes.Node]) -> str | None:
        return next((use for part in parts if (use := _first_use(part, name))), None)

    match node:
        case nodes.Name():
            return None if node.name != name else "load" if node.ctx == "load" else "store"
        case nodes.If():
            uses = [first([each.test, *each.body]) for each in (node, *node.elif_)]
            uses.append(first(node.else_))
            if first([node.test]) or "load" in uses:
                return "load"
            return "store" if set(uses) == {"store"} else None
        case nodes.Assign():
            return first([node.node, node.target])
        case nodes.For():
            inner = [node.target, *([node.test] if node.test else ()), *node.body]
            uses = [first([node.iter]), first(inner), first(node.else_)]
        case nodes.With():
            uses = [first(node.values), first([*node.targets, *node.body])]
        case nodes.AssignBlock():
            uses = [first(node.body)]
            return "load" if "load" in uses else first([node.target])
        case nodes.Macro() | nodes.CallBlock() | nodes.FilterBlock() | nodes.Block() | nodes.Scope():
            uses = [first(node.iter_child_nodes())]
        case _:
            return first(node.iter_child_nodes())
    return "load" if "load" in uses else None  # what is set within is not set behind it


def _with_checks(tree: "jinja2.nodes.Template") -> "jinja2.nodes.Template":
    """Return a template that calls `_CHECK` at each turn of a loop and call of a macro, and on values that may grow.

    Those are what `~` and `+` make and what is written out. `_check_step` looks at the steps that could make much of
    little: products, formats, paddings, replacements.
    """
    from jinja2 import nodes, visitor

    def check(line: int, *values: nodes.Expr) -> nodes.Call:
        return nodes.Call(nodes.Name(_CHECK, "load"), list(values), [], None, None, lineno=line)

    class WithChecks(visitor.NodeTransformer):
        def visit_block(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
            self.generic_visit(node)
            node.body.insert(0, nodes.ExprStmt(check(node.lineno), lineno=node.lineno))
            return node

        def visit_sum(self, node: nodes.Concat | nodes.Add) -> nodes.Node:
            self.generic_visit(node)
            return check(node.lineno, node)

        def visit_Output(self, node: nodes.Output) -> nodes.Node:
            self.generic_visit(node)
            is_text = lambda part: isinstance(part, nodes.TemplateData)
            node.nodes = [part if is_text(part) else check(node.lineno, part) for part in node.nodes]
            return node

        visit_For = visit_Macro = visit_CallBlock = visit_block
        visit_Concat = visit_Add = visit_sum

    return WithChecks().visit(tree).set_environment(tree.environment)


def _check_until(deadline: float) -> Callable[..., Any]:
    """Return the function that a template calls as `_CHECK`: it gives a value back, or ends the rendering."""

    def check(value: Any = None) -> Any:
        if time.monotonic() > deadline:
            raise ValueError(f"it takes more than {_MOST_SECONDS:g} seconds")
        if isinstance(value, str | list | tuple) and len(value) > _MOST_CHARACTERS:
            raise ValueError(f"it makes a value longer than {_MOST_CHARACTERS:,} characters or entries")
        return value

    return check


def _checked_filter(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of jinja2's filters with `_check_step` before it."""
    own = int(hasattr(run, "jinja_pass_arg"))  # its first argument is jinja2's own

    @wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, others = args[own], args[own + 1 :]
        if name == "join":
            value = list(value)
            _check_step(name, "".join(map(str, others[:1])), value)
        else:
            _check_step(name, value, *others, *kwargs.values())
        return run(*args[:own], value, *others, **kwargs)

    return checked


def _check_step(name: str, left: Any, *others: Any) -> None:
    """Raise ValueError if one step of a template would make a value that is too long.

    Args:
        name: of the operator, the method of a text, or the filter.
        left: its left operand, or its text.
        others: the right operand, or the other arguments.
    """
    length = lambda value: len(value) if isinstance(value, str | list | tuple) else 1
    is_number = lambda value: isinstance(value, int)
    most = lambda values: max(filter(is_number, values), default=0)
    digits = lambda value: value.bit_length() // 3
    match name, others:
        case "*", (right,) if is_number(left) and is_number(right):
            size = digits(left) + digits(right)
        case "*", (right,):
            size = length(left) * length(right) * most((left, right))
        case "**", (int() as right,) if is_number(left):
            size = digits(left) * right
        case (("%" | "format"), _) if isinstance(left, str):
            # Widths stand in the format, or, where it says so by * or by braces within braces, among the values.
            values = [each for value in others for each in (value if isinstance(value, tuple) else (value,))]
            has_width_in_values = re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{", left)
            size = most([*map(int, re.findall(r"\d+", left)), *(values if has_width_in_values else ())])
        case (("center" | "ljust" | "rjust" | "zfill"), _):
            size = most(others)
        case (("indent" | "expandtabs"), _):
            size = most(others) * (1 + str(left).count("\t" if name == "expandtabs" else "\n"))
        case "replace", (old, new, *_):
            size = str(left).count(str(old)) * len(str(new))
        case "join", (list() | tuple() as items,):
            size = sum(len(str(item)) + len(str(left)) for item in items)
        case _:
            return
    if size > _MOST_CHARACTERS:
        raise ValueError(f"one step, {name}, would make a value longer than {_MOST_CHARACTERS:,} characters or entries")


def _rendered(template: "jinja2.Template", variables: dict[str, Any]) -> str:
    """Return a template's text; raise ValueError where it takes too long or is too long."""
    check = _check_until(time.monotonic() + _MOST_SECONDS)
    pieces, characters = [], 0
    for piece in template.generate({**variables, _CHECK: check}):
        pieces.append(check(piece))
        characters += len(piece)
        if characters > _MOST_CHARACTERS:
            raise ValueError(f"its text is longer than {_MOST_CHARACTERS:,} characters")
    return "".join(pieces)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Return JSON without the HTML escapes of jinja2's own filter, and by default without escapes of non-ASCII text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=False
    )
