"""Tools and tool calls of a request: arguments become objects, and results are put in the order of their calls."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from m3jax.messages import printable, shortened, shown
from m3jax.text.chat.fields import check_fields, json_copy
from m3jax.text.chat.functions import function_tool
from m3jax.text.chat.schemas import check_schema

# A tool's name stands in <invoke name="...">, so it has no quotes, angle brackets or line breaks.
_NAME = re.compile(r'[^"<>\n\r]+')


def ordered_tools(tools: Any) -> list[dict[str, Any]]:
    """Check the tools of a request.

    Args:
        tools: None, or a list of {"type": "function", "function": {"name", "description", "parameters"}}, where
            parameters is a JSON schema of an object, or of Python functions (`function_tool`).

    Returns:
        A copy, functions as objects; [] for None.

    Raises:
        ValueError: not such a list, two tools of one name, a broken schema, a field that the model
            would not see, or a function without annotations or a docstring.
    """
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools is a list of tools, got {shown(tools)}")
    ordered = [_tool(tool, f"tool {number}") for number, tool in enumerate(tools, 1)]
    names = [tool["function"]["name"] for tool in ordered]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools are called {shown(twice)}; a call could not say which it means")
    return ordered


def _tool(tool: Any, location: str) -> dict[str, Any]:
    if callable(tool):
        tool = function_tool(tool, location)
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        raise ValueError(f'{location}: write it as {{"type": "function", "function": {shown(dict(tool))}}}')
    check_fields(tool, ("type", "function"), location, "a tool")
    if tool.get("type", "function") != "function":
        raise ValueError(f"{location}: type = {shown(tool['type'])}: only functions can be called")
    function = json_copy(tool.get("function"), location)
    if not isinstance(function, dict):
        raise ValueError(f"{location}: function = {shown(function)}: must be an object with a name")
    _check_name(function.get("name"), location)
    location = f"{location} ({printable(function['name'])})"
    if not isinstance(function.get("description"), str | None):
        raise ValueError(f"{location}: description = {shown(function['description'])}: must be a text")
    if "parameters" not in function:
        return {"type": "function", "function": function}
    schema = function["parameters"]
    if schema is None:
        raise ValueError(f"{location}: parameters = None: leave it out, or give a JSON schema of an object")
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ValueError(f"{location}: parameters = {shown(schema)}: must be a JSON schema of an object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(each, dict | bool) for each in properties.values()):
        raise ValueError(f"{location}: properties = {shown(properties)}: must be an object with a schema for each name")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise ValueError(f"{location}: required = {shown(required)}: must be a list of names")
    check_schema(schema, location)
    return {"type": "function", "function": function}


def ordered_calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Write an assistant's calls in the spelling of templates, their arguments as objects.

    Args:
        calls: None, or a list of {"id", "type": "function", "function": {"name", "arguments"}}, also without the inner
            object; arguments are an object or its JSON text.
        location: their place in the request, for errors.

    Returns:
        The calls; [] for None.

    Raises:
        ValueError: not such a list, or arguments that are not an object. It names the call.
    """
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise ValueError(f"{location}: tool_calls is a list, got {shown(calls)}")
    return [_call(call, number, f"{location}, call {number + 1}") for number, call in enumerate(calls)]


def _call(call: Any, number: int, location: str) -> dict[str, Any]:
    is_flat = isinstance(call, Mapping) and call.get("function") is None
    fields = ("name", "arguments")
    check_fields(call, ("id", "type", "index", *(fields if is_flat else ("function",))), location, "a call")
    if call.get("type", "function") != "function":
        raise ValueError(f"{location}: type = {shown(call['type'])}: only functions can be called")
    if call.get("index", number) != number:
        raise ValueError(f"{location}: index = {shown(call['index'])}, but it is number {number} of the list, from 0")
    function = call if is_flat else call["function"]
    if not is_flat:
        check_fields(function, fields, location, "a function")
    _check_name(function.get("name"), location)
    location = f"{location} ({printable(function['name'])})"
    call_id = call.get("id")
    if call_id is not None and not (isinstance(call_id, str) and call_id):
        raise ValueError(f"{location}: id = {shown(call_id)}: must be a text, and not empty")
    arguments = _arguments(function.get("arguments"), location)
    ordered = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return ordered if call_id is None else {"id": call_id, **ordered}


def _check_name(name: Any, location: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f'{location}: name = {shown(name)}: must be a text of one line without ", < and >')


def _arguments(given: Any, location: str) -> dict[str, Any]:
    """Return the arguments of one call as an object."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given, object_pairs_hook=_object, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError(f"{location}: arguments nest too deep") from None
        except ValueError as error:
            raise ValueError(f"{location}: arguments = {shown(given)} are not valid JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{location}: arguments = {shown(given)}: must be an object, or its JSON; {{}} for none")
    return json_copy(arguments, f"{location}: arguments", are_tags=True)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's dictionary; raise ValueError for a repeated key, of which one value would be lost."""
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} stands twice")
    return members


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it has no {name}")


def linked_results(calls: list[dict[str, Any]], results: list[dict[str, Any]], location: str) -> list[dict[str, Any]]:
    """Put the results of a turn's calls in the order of the calls, which is all that links them in a prompt.

    Args:
        calls: in order.
        results: the tool messages that follow them; each has the id of its call. Where neither calls nor results have
            ids, they are in order already.
        location: the place of the calls in the request, for errors.

    Returns:
        The results, one a call.

    Raises:
        ValueError: an id that is missing, stands twice or is no call's, a call without its result, or a result whose
            name is not that of its function.
    """
    call_ids = [call.get("id") for call in calls]
    result_ids = [result.get("tool_call_id") for result in results]
    if any(call_ids) or any(result_ids):
        for ids, party, field in ((call_ids, "call", "id"), (result_ids, "result", "tool_call_id")):
            if None in ids:
                raise ValueError(
                    f"{location}: {party} {ids.index(None) + 1} has no {field}; give one to each, or to none"
                )
            if twice := next((each for each in ids if ids.count(each) > 1), None):
                raise ValueError(f"{location}: two {party}s have the {field} {shown(twice)}")
        if unknown := next((each for each in result_ids if each not in call_ids), None):
            known = shortened(", ".join(map(shown, call_ids)), 200)
            raise ValueError(f"{location}: no call has the id {shown(unknown)} of a result; theirs are {known}")
        if lacking := next((each for each in call_ids if each not in result_ids), None):
            raise ValueError(
                f"{location}: call {call_ids.index(lacking) + 1} with the id {shown(lacking)} has no result"
            )
        results = [results[result_ids.index(each)] for each in call_ids]
    elif len(calls) != len(results):
        raise ValueError(f"{location}: {len(calls)} calls and {len(results)} results; give each call its own")
    for call, result in zip(calls, results, strict=True):
        name = call["function"]["name"]
        if result.get("name") not in (None, name):
            raise ValueError(f"{location}: the result of {printable(name)} is named {shown(result['name'])}")
    return results
