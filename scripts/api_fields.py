"""Writes docs/api-fields.md: what the server does with each field of each API.

python -m scripts.api_fields
"""

from pathlib import Path

from mlx_paged.protocol.fields import API_OF, all_fields, treatment

PAGE = Path(__file__).parents[1] / "docs" / "api-fields.md"
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
HEAD = """# Fields of requests

`python -m scripts.api_fields` writes this page from the tables that the server obeys
(`mlx_paged/protocol/fields.py`). [server.md](server.md) says what the fields mean.

- *obeyed*: the answer follows the field, or the request is refused with 400 and the field's name.
- *refused*: 400 with the field's name.
- *changes no answer*: accepted; it asks for nothing that this server does otherwise.
- *ignored by name*: accepted; the header `x-ignored-fields` names it, and `--strict-fields` refuses
  it. The same happens to fields that are not listed.

A value of `null` is the same as no field. Other fields that begin with `guided_` are refused.

"""


def page() -> str:
    rows = [["field", *(f"`{PATHS[api]}`" for api in PATHS)], ["---"] * (1 + len(PATHS))]
    for name in sorted(all_fields()):
        found = [treatment(api, name).replace("|", "\\|") for api in PATHS]
        rows.append([f"`{name}`", *found])
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    assert set(PATHS) == set(API_OF)
    PAGE.write_text(page())
