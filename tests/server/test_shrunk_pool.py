"""A pool that is smaller while memory is short refuses for now what it could hold at its size."""

from mlx_paged.engine.pool_size import PoolSize
from tests.support.commands.server_harness import live, only_model, post

TEXT = {"prompt": "import os", "max_tokens": 1500}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1500}


def test_a_request_for_the_configured_pool_may_be_sent_again_later():
    with live() as server:
        service = only_model(server).service

        def size_of(engine):
            unended = engine._requests.values
            return PoolSize(engine.scheduler, engine.runner, engine.stats, unended)

        size = service.call(size_of)
        assert service.call(lambda engine: size.change(8))
        for body, path in ((TEXT, "/v1/completions"), (CHAT, "/v1/messages")):
            status, headers, answer = post(server, body, path)
            assert status == 503 and headers["Retry-After"] == "60", answer
            assert "while the system is short of memory" in answer["error"]["message"]
        assert post(server, TEXT | {"max_tokens": 5})[0] == 200
        assert service.call(lambda engine: size.change(size.largest))
        assert post(server, TEXT | {"max_tokens": 1000, "stop": [" ", "\n"]})[0] == 200
