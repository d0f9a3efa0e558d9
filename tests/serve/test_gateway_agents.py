"""Requests as Claude Code and Open WebUI send them: their fields and shapes, with other texts.

Claude Code's are those that version 2.1.197 sent for `claude -p` with a file to read (24 November 2026), experimental
betas on; Open WebUI's are what its routers `openai.py` and `tasks.py` send (commit 074d488).
"""

import base64
import io
import json

from PIL import Image
from support.embedded import TOKENIZER
from support.serving import NAME, NS

AGENT_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,"
    "effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-api-key": "x",
    "x-app": "cli",
    "content-type": "application/json",
}
CACHED = {"cache_control": {"type": "ephemeral"}}
READ_TOOL = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"description": "The absolute path", "type": "string"},
            "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
            "mode": {"type": "string", "enum": ["text", "pages"]},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
AGENT = {
    "model": NAME,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is a day.\n</system-reminder>"},
                {"type": "text", "text": "What does the note say?", **CACHED},
            ],
        },
        {"role": "system", "content": "These agents exist: none."},
    ],
    "system": [
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "\nYou read files.", **CACHED},
    ],
    "tools": [READ_TOOL, {"name": "TaskList", "description": "", "input_schema": {"type": "object", "properties": {}}}],
    "metadata": {"user_id": '{"device_id":"e5e5","account_uuid":"","session_id":"99cc"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def prompt_of(request) -> str:
    return TOKENIZER.decode(request.tokenized.input_ids, skip_special_tokens=False)


def stream_of(server, body: dict) -> list[dict]:
    status, _, text = server.ask("/v1/messages?beta=true", body, headers=AGENT_HEADERS)
    assert status == 200, text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_claude_code_reads_a_file(scripted):
    """Both requests of a task with one tool are taken as they come, and all that they say reaches the model."""
    server, worker = scripted
    call = f'{NS}<invoke name="Read">{NS}<file_path>/note.txt{NS}</file_path>{NS}</invoke>'
    worker.script = lambda request, index: f"I will read it.{NS}<tool_call>\n{call}{NS}</tool_call>"
    assert server.ask("/", method="HEAD")[0] == 200  # it looks whether the server is there
    events = stream_of(server, AGENT)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["text", "tool_use"] and begun[1]["name"] == "Read"
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"file_path": "/note.txt"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1]["type"] == "message_stop"
    prompt = prompt_of(worker.requests[0])
    assert all(text in prompt for text in ("You are an agent.", "You read files.", "Today is a day.", "file_path"))
    # M3's template shows one system message; what comes later stands where it was said.
    assert prompt.index("What does the note say?") < prompt.index("These agents exist: none.")

    worker.script = lambda request, index: "It says hello."
    use = {"type": "tool_use", "id": begun[1]["id"], "name": "Read", "input": {"file_path": "/note.txt"}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1\thello\n2\t", **CACHED}
    answered = [
        {"role": "assistant", "content": [{"type": "text", "text": "I will read it."}, use]},
        {"role": "user", "content": [result]},
    ]
    events = stream_of(server, {**AGENT, "messages": [*AGENT["messages"], *answered]})
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    prompt = prompt_of(worker.requests[1])
    assert prompt.index("These agents exist") < prompt.index("/note.txt") < prompt.index("1\thello")


def test_open_webui_chats_and_names_the_chat(scripted):
    """The list of models, a streamed answer about a picture with counts, and what it asks for itself besides."""
    server, worker = scripted
    key = {"Authorization": "Bearer any", "Content-Type": "application/json", "X-OpenWebUI-User-Name": "A%20User"}
    status, _, text = server.ask("/v1/models", headers=key)
    assert status == 200 and [model["id"] for model in json.loads(text)["data"]] == [NAME]
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    chat = {
        "stream": True,
        "model": NAME,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 100,
    }
    status, headers, text = server.ask("/v1/chat/completions", chat, headers=key)
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
    *chunks, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] > 0
    said = [choice["delta"].get("reasoning_content") or "" for chunk in chunks for choice in chunk["choices"]]
    said += [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(said) == "All is well." and len(worker.requests[0].mm_inputs.pixel_values.inline) > 0

    # The title, the tags and the next questions of a chat are answers of a JSON object that it looks for in the text.
    worker.script = lambda request, index: '{"title": "A red square"}'
    title = {"model": NAME, "messages": [{"role": "user", "content": "### Task:\nGenerate a title."}], "stream": False}
    for body in ({**title, "max_completion_tokens": 1000}, title):
        status, _, text = server.ask("/v1/chat/completions", body, headers=key)
        assert status == 200, text
        assert json.loads(json.loads(text)["choices"][0]["message"]["content"]) == {"title": "A red square"}
