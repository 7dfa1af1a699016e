"""Fields about thinking reach the template, and a budget ends a thought."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate

from mlx_paged.formats.format import Format, Limit
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.thoughts import Thoughts
from mlx_paged.protocol import thinking
from mlx_paged.protocol.templates import Abilities, tried
from tests.support.commands.server_harness import MODEL, client, demo, live, only_model, post

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = (
    "{{ reasoning_effort }}"
    + TURNS
    + "{% if add_generation_prompt %}{% if enable_thinking %}<think>"
    + "{% else %}<think></think>{% endif %}{% endif %}"
)
BODY = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 4}
START, END = "<think>", "</think>"


@pytest.fixture(scope="module")
def thinker():
    """A server whose model has marks for thoughts, as a tokenizer of mlx-lm would tell them."""
    with live("--chat-template", TEMPLATE) as server:
        model = only_model(server)
        vars(model.tokenizer)["_think_start"] = START  # mlx-lm asks the template to think then
        model.abilities = tried(model.tokenizer)
        model.format = Format(Marks({}), Thoughts(START, END))
        yield server


def num_tokens(server, fields, path="/v1/chat/completions", body=BODY):
    status, headers, answer = post(server, body | fields, path)
    assert status == 200, answer
    usage = answer["usage"]
    found = usage.get("prompt_tokens") or sum(
        usage[name] for name in ("input_tokens", "cache_read_input_tokens") if name in usage
    )
    return found, headers.get("x-ignored-fields")


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, "", True),
        ({"enable_thinking": False}, "", False),
        ({"reasoning_effort": "none"}, "none", False),
        ({"reasoning_effort": "high"}, "high", True),
        ({"reasoning_effort": "high", "enable_thinking": False}, "high", False),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low", 0),
    ],
    ids=str,
)
def test_fields_of_chats_reach_the_template(thinker, fields, effort, thinks):
    prompt = f"{effort}user: def f\n<think>{'' if thinks else '</think>'}"
    assert num_tokens(thinker, fields) == (len(demo()[1].encode(prompt)), None)


@pytest.mark.parametrize(
    ("path", "fields", "effort", "thinks"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "", False),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "", True),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "max", True),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "none", False),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "low", True),
    ],
    ids=str,
)
def test_fields_of_the_other_apis_reach_it_too(thinker, path, fields, effort, thinks):
    body = BODY if path == "/v1/messages" else {"input": "def f", "max_output_tokens": 4}
    prompt = f"{effort}user: def f\n<think>{'' if thinks else '</think>'}"
    assert num_tokens(thinker, fields, path, body) == (len(demo()[1].encode(prompt)), None)


@pytest.mark.parametrize(
    ("abilities", "thinks", "fields", "args", "ignored"),
    [
        (Abilities(), True, {"enable_thinking": True}, {}, []),
        (Abilities(), True, {"enable_thinking": False}, {}, ["enable_thinking"]),
        (Abilities(), False, {"enable_thinking": False}, {}, []),
        (Abilities(), False, {"enable_thinking": True}, {}, ["enable_thinking"]),
        (Abilities(), True, {"reasoning_effort": "none"}, {}, ["reasoning_effort"]),
        (Abilities(), False, {"reasoning_effort": "none"}, {}, []),
        (Abilities(), False, {"reasoning_effort": "high"}, {}, ["reasoning_effort"]),
        (Abilities(), False, {"thinking_budget": 9}, {}, ["thinking_budget"]),
        (Abilities("thinking"), True, {"enable_thinking": False}, {"thinking": False}, []),
        (
            Abilities("thinking"),
            True,
            {"reasoning_effort": "low"},
            {"thinking": True},
            ["reasoning_effort"],
        ),
        (Abilities(None, True), True, {"reasoning_effort": "x"}, {"reasoning_effort": "x"}, []),
    ],
    ids=str,
)
def test_what_a_template_cannot_do_is_ignored_by_name(abilities, thinks, fields, args, ignored):
    class Fake:
        format = type("", (), {"thinks": thinks, "efforts": {}})

    Fake.abilities = abilities
    assert thinking.template_args(Fake, fields) == (args, ignored)


def test_without_a_switch_the_answer_names_what_was_asked():
    with live("--chat-template", TURNS) as server:
        fields = {"reasoning_effort": "high", "thinking_budget": 3}
        assert num_tokens(server, fields)[1] == "reasoning_effort, thinking_budget"
        body = {"input": "a", "reasoning": {"effort": "high"}}
        assert num_tokens(server, {}, "/v1/responses", body)[1] == "reasoning.effort"
    with live("--chat-template", TURNS, "--strict-fields") as server:
        status, _, answer = post(
            server, BODY | {"reasoning_effort": "high"}, "/v1/chat/completions"
        )
        assert status == 400 and "reasoning_effort: unknown" in answer["error"]["message"]


def expected(budget, count):
    """What mlx-lm generates after a thought of `budget` tokens and its end."""
    model, tokenizer = demo()
    prompt = tokenizer.encode("user: def f\n<think>")
    first = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=max(budget, 1))]
    thought = first[:budget]
    end = tokenizer.encode(END, add_special_tokens=False)
    rest = stream_generate(model, tokenizer, prompt + thought + end, max_tokens=count)
    return tokenizer.decode(thought), "".join(r.text for r in rest), len(end)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 6])
def test_a_budget_ends_the_thought_by_force(thinker, budget, streams):
    thought, rest, num_end = expected(budget, 8)
    with client(thinker) as made:
        options = {"model": MODEL, "messages": BODY["messages"], "stream": streams}
        options |= {"max_tokens": budget + num_end + 8, "extra_body": {"thinking_budget": budget}}
        answer = made.chat.completions.create(**options)
        if streams:
            said = [packet.choices[0].delta for packet in answer]
            text = "".join(delta.content or "" for delta in said)
            reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in said)
        else:
            (choice,) = answer.choices
            text, reasoning = choice.message.content, getattr(choice.message, "reasoning", "")
            thoughts = answer.usage.completion_tokens_details.reasoning_tokens
            assert budget <= thoughts <= budget + num_end
    assert reasoning == thought and text == rest


SPACE = 5
"""The token of white space in the test below."""


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("start", "end", "forced"),
    [((1,), (2,), (2,)), ((1, 3), (2, 3, 4), (2, 3, 4)), ((1, 3), (2,), (2, 3, 4, 1))],
)
def test_the_budget_counts_the_first_thought(start, end, forced, begins):
    """Against the definition, token by token, with marks of one and of several tokens."""
    rng, vocab, num_prompt, budget = np.random.default_rng(0), 6, 4, 3
    texts = {"s": start, "e": end, "f": forced}
    encode = lambda text, add_special_tokens: texts.get(text, (SPACE,))  # noqa: E731
    form = SimpleNamespace(limit=lambda may_call: Limit("s", "e", "f"))
    model = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), format=form)
    process, num_forced = thinking.limit(model, num_prompt, begins, budget), 0
    for _ in range(40):
        prompt, own = rng.integers(0, vocab, num_prompt).tolist(), []
        if rng.random() < 0.5:
            own = [*[SPACE] * rng.integers(0, 3), *start][: rng.integers(0, 5)]
        for _ in range(20):
            logits = mx.array(rng.normal(size=(1, vocab)), mx.float32)
            found = np.array(process(mx.array([*prompt, *own], mx.int32), logits))
            want = wanted(own, start, end, forced, begins, budget)
            if want is None:
                assert (found == np.array(logits)).all()
                own.append(int(rng.integers(0, vocab)))
            else:
                assert np.isneginf(np.delete(found[0], want)).all() and found[0, want] == 0
                own.append(want)
                num_forced += 1
    assert num_forced


def wanted(own, start, end, forced, begins, budget):
    """The token that must follow, by the definition; None if any may."""
    text, begun = [*own], 0
    if not begins:
        while text and text[0] == SPACE:
            text.pop(0)
        if tuple(text[: len(start)]) != start:
            return None
        begun = len(own) - len(text) + len(start)
    thought = own[begun : begun + budget]
    ended = any(tuple(thought[i : i + len(end)]) == end for i in range(len(thought)))
    spent = len(own) - begun - budget
    return None if ended or not 0 <= spent < len(forced) else forced[spent]
