"""The table of fields is what the server does, and knows the fields of the clients."""

import json

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from mlx_paged.protocol import messages, responses
from mlx_paged.protocol.fields import API_OF, all_fields, treatment
from mlx_paged.protocol.request_body import read
from scripts.api_fields import PAGE, page

SENT = {
    "completions": completion_create_params.CompletionCreateParamsBase,
    "chat": chat_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
}
WHOLE = {
    "completions": {"prompt": "a"},
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "responses": {"input": "a"},
}
AS_CHAT = {
    "completions": dict,
    "chat": dict,
    "messages": lambda body: messages.as_chat(body, counts=False),
    "responses": responses.as_chat,
}
STRANGE = {"strange": "value"}


def client_fields(api):
    if api != "messages":
        return set(SENT[api].__annotations__)
    anthropic = pytest.importorskip("anthropic")
    return set(anthropic.types.message_create_params.MessageCreateParamsBase.__annotations__)


def test_the_page_is_what_the_tables_say():
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("api", API_OF)
def test_every_field_of_the_clients_is_known(api):
    fields = client_fields(api)
    assert len(fields) > 10
    assert fields - all_fields() == set()


@pytest.mark.parametrize("api", API_OF)
def test_each_field_is_treated_as_the_table_says(api):
    """A strange value is refused where a field is obeyed or refused, and named where it is not."""
    for name in sorted(all_fields() - set(WHOLE[api])):
        body, said = WHOLE[api] | {name: STRANGE}, treatment(api, name)
        try:
            found, ignored = read(AS_CHAT[api](body), api != "completions", 16)
        except ValueError as error:
            assert said.split(",")[0] in ("obeyed", "refused"), (name, error)
            continue
        if said.startswith("ignored"):
            assert name in ignored, name
        elif said == "obeyed":
            assert "strange" in json.dumps([found, ignored], default=dict), name
        else:
            assert said == "changes no answer" and ignored == [], name
