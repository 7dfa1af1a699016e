"""Turns of the assistant as clients of the other APIs send them back."""

import pytest

from mlx_paged.protocol import messages, responses

QUESTION = {"role": "user", "content": "q"}
CALL = {"type": "tool_use", "id": "i", "name": "f"}


def said_in_blocks(*blocks):
    """The assistant's message of a request of the Messages API."""
    turns = [QUESTION, {"role": "assistant", "content": [*blocks]}, QUESTION]
    return messages.as_chat({"max_tokens": 1, "messages": turns}, counts=False)["messages"][1]


def said_in_items(*items):
    """The assistant's first message of a request of the Responses API."""
    return responses.as_chat({"input": [QUESTION, *items, QUESTION]})["messages"][1]


def thinking(thought):
    return {"type": "thinking", "thinking": thought, "signature": ""}


def reasoning(thought):
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}


def test_all_thoughts_of_a_turn_reach_the_template():
    """Harmony's models think between two calls, so that a turn has several thoughts."""
    text = {"type": "text", "text": "a"}
    said = said_in_blocks(thinking("one"), text, thinking("two"), CALL | {"input": {}})
    assert (said["reasoning_content"], said["content"]) == ("one\n\ntwo", "a")
    answer = {"type": "message", "role": "assistant", "content": "a"}
    said = said_in_items(reasoning("one"), reasoning("two"), answer)
    assert (said["reasoning_content"], said["content"]) == ("one\n\ntwo", "a")


@pytest.mark.parametrize("thought", [None, ""])
def test_a_thought_without_text_is_none(thought):
    said = said_in_blocks(thinking(thought), {"type": "text", "text": "a"})
    assert said == {"role": "assistant", "content": "a"}


def test_thoughts_and_inputs_of_another_kind_are_refused_by_name():
    for thought in (["x"], 5, {}):
        with pytest.raises(ValueError, match=r"messages\[1\]\.content\.thinking: expected a text"):
            said_in_blocks(thinking(thought))
    for given in ("x", [1], 5):
        with pytest.raises(ValueError, match=r"messages\[1\]\.content\.input: expected an object"):
            said_in_blocks(CALL | {"input": given})


def test_a_call_without_input_has_no_arguments():
    for call in (CALL, CALL | {"input": None}, CALL | {"input": {}}):
        (told,) = said_in_blocks(call)["tool_calls"]
        assert told["function"] == {"name": "f", "arguments": "{}"}
