"""Items of newer Codex in a history, and pictures in results of tools, end no session."""

import pytest

from mlx_paged.protocol import messages, responses
from mlx_paged.protocol.images import LEFT_OUT, told

USER = {"role": "user", "content": "a"}
PNG = "data:image/png;base64,iVBORw0KGgo="


def test_custom_and_shell_calls_are_calls():
    action = {"type": "exec", "command": ["ls"]}
    items = [
        USER,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** a\n\t"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "local_shell_call", "call_id": "d", "action": action, "status": "completed"},
        {"type": "local_shell_call_output", "id": "d", "output": "x"},
    ]
    chat = responses.as_chat({"input": items})["messages"]
    assert [turn["role"] for turn in chat] == ["user", "assistant", "tool", "assistant", "tool"]
    functions = [turn["tool_calls"][0]["function"] for turn in (chat[1], chat[3])]
    assert functions == [
        {"name": "apply_patch", "arguments": '{"input": "*** a\\n\\t"}'},
        {"name": "local_shell", "arguments": '{"type": "exec", "command": ["ls"]}'},
    ]
    assert [(turn["tool_call_id"], turn["content"]) for turn in (chat[2], chat[4])] == [
        ("c", "done"),
        ("d", "x"),
    ]


@pytest.mark.parametrize("kind", responses.PASSED_OVER)
def test_other_items_are_passed_over_by_name(kind):
    chat = responses.as_chat({"input": [USER, {"type": kind}, USER]})
    assert chat["messages"] == [USER, USER] and chat[f"input.{kind}"] is True
    with pytest.raises(ValueError, match="input: expected an item"):
        responses.as_chat({"input": [{"type": kind}]})


@pytest.mark.parametrize("url", [PNG, "https://example.org/a.png", "data:image/png;base64,*", 7])
def test_a_picture_in_a_result_becomes_a_sentence_for_a_blind_model(url):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "seen: "}, {"type": "input_image", "image_url": url}]
    result = {"type": "function_call_output", "call_id": "c", "output": parts}
    chat = responses.as_chat({"input": [USER, call, result]})["messages"]
    assert told(chat)[2]["content"] == f"seen: {LEFT_OUT}"
    image = {"type": "image", "source": {"type": "url", "url": url}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": [image], "is_error": True}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}
    body = {"max_tokens": 1, "messages": [USER, use, {"role": "user", "content": [block]}]}
    chat = messages.as_chat(body, False)["messages"]
    assert told(chat)[2]["content"] == f"Error: {LEFT_OUT}"
