"""GET /v1/cache tells counts of the caller's salt, and nothing of texts."""

import json

from tests.support.commands.server_harness import exchange, live, post

TEXT = "def one_secret_name(argument):\n    return argument + 12345\n" * 2


def view(server, query="", **headers):
    status, _, body = exchange(server, "GET", f"/v1/cache{query}", headers=headers)
    return status, json.loads(body), body.decode()


def test_chains_of_a_salt_are_counted_and_texts_are_not_told():
    with live("--kv-block-size", "4") as server:
        for salt in ("", "mine"):
            ask = {"prompt": TEXT, "max_tokens": 2, "cache_salt": salt}
            assert post(server, ask)[0] == 200
        tokens = post(server, {"content": TEXT}, "/tokenize")[2]["tokens"]
        status, found, text = view(server, "?cache_salt=mine")
        assert status == 200 and "secret" not in text and found["object"] == "list"
        [model] = found["data"]
        assert model["num_chains"] == len(model["chains"]) == 1
        assert len(tokens) - 5 <= model["chains"][0]["tokens"] <= len(tokens) + 2
        assert view(server)[1]["data"][0]["num_chains"] == 1
        assert view(server, "?cache_salt=others")[1]["data"][0]["num_chains"] == 0


def test_bad_queries_are_refused():
    with live() as server:
        for query in ("?limit=0", "?limit=1001", "?limit=x", "?limit=99999999999", "?tokens=1"):
            status, found, _ = view(server, query)
            assert status == 400 and "expected" in found["error"]["message"], query
        assert view(server, "?limit=1000")[0] == 200


def test_the_view_needs_the_key():
    with live("--api-key", "secret") as server:
        assert view(server)[0] == 401
        assert view(server, **{"x-api-key": "secret"})[0] == 200


def test_the_admins_key_shows_all_salts_and_whose_chains_are_the_same():
    with live("--api-key", "ann=k", "--admin-key", "boss", "--kv-block-size", "4") as server:
        for salt in ("", "a", "b"):
            for end in (" 1", " 2"):
                ask = {"prompt": TEXT + end, "max_tokens": 1, "cache_salt": salt}
                assert post(server, ask, headers={"x-api-key": "k"})[0] == 200
        [of_client] = view(server, **{"x-api-key": "k"})[1]["data"]
        assert of_client["num_chains"] == 2 and "owner" not in of_client["chains"][0]
        [of_all] = view(server, **{"x-api-key": "boss"})[1]["data"]
        owners = [chain["owner"] for chain in of_all["chains"]]
        assert of_all["num_chains"] == 6 and sorted(map(owners.count, {*owners})) == [2, 2, 2]
        assert "" in owners and not {"a", "b"} & {*owners}
        [named] = view(server, "?cache_salt=a", **{"x-api-key": "boss"})[1]["data"]
        assert named["num_chains"] == 2
