"""A full directory keeps what was used, and takes what was never used if it is worth as much."""

import pytest
from test_packs_and_store import key_of, open_store, payload_of

from mlx_paged.kv_disk import store
from mlx_paged.kv_disk.packs import MOST_USES, NO_ORIGIN, Origin
from tests.support.engine.disk_engines import GREEDY, make_engine, tokens_of
from tests.support.models import tiny_models

NEW = Origin(is_used=False)
WORTH = 100


def small(directory):
    """Room for ten packs of nine records."""
    made = open_store(directory, max_bytes=102_500)
    made._packs._pack_bytes = 10_000
    made.set_least(WORTH)
    return made


def put(made, numbers, origin=NEW):
    for number in numbers:
        made.put(key_of(number), payload_of(number), origin)
    made.flush()


def read(made, numbers, worth=WORTH):
    """Read records of that worth."""
    keys = [key_of(number) for number in numbers]
    load = made.load(keys, dict.fromkeys(keys, worth))
    for future in load.futures:
        future.result()
    made.flush()
    assert len(load.found) == len(keys)


def kept(made, numbers):
    return [number for number in numbers if key_of(number) in made]


def test_what_was_never_read_gives_way_to_new_content_the_oldest_first(tmp_path):
    made = small(tmp_path)
    put(made, range(108))
    assert kept(made, range(108)) == [*range(18, 108)] and not made.dropped
    made.close()


def test_new_content_is_not_written_where_all_was_read_more_than_once(tmp_path):
    made = small(tmp_path)
    put(made, range(90))
    for _ in range(2):
        read(made, range(90))
    put(made, range(100, 110))
    assert kept(made, [*range(90), *range(102, 110)]) == [*range(90)]
    assert made.dropped == {"worth": 8}  # there was room for two
    put(made, range(100, 110), Origin(worth=WORTH))
    assert kept(made, range(100, 110)) == [*range(100, 110)]
    made.close()


def test_the_packs_whose_use_is_worth_least_go_first(tmp_path):
    """Those of which little was read, though it was read last, and those of cheap content."""
    made = small(tmp_path)
    put(made, range(90))
    read(made, range(9, 18))
    read(made, range(18, 27), worth=3 * WORTH)
    read(made, range(27, 90))
    read(made, [0])
    put(made, range(100, 109), Origin(worth=WORTH))
    assert kept(made, range(90)) == [*range(9, 90)]
    put(made, range(110, 119), Origin(worth=WORTH))
    assert kept(made, range(9, 27)) == [*range(18, 27)]
    made.close()


def test_what_is_not_used_any_more_goes_at_last(tmp_path, monkeypatch):
    """However often it was read."""
    monkeypatch.setattr(store, "DAILY_WRITES", 100)
    made = small(tmp_path)
    put(made, range(90))
    for _ in range(3 * MOST_USES):
        read(made, range(45))
    for first in range(100, 100 + 9 * 4 * MOST_USES, 9):
        put(made, range(first, first + 9), Origin(worth=WORTH))
    assert kept(made, range(45)) == [*range(45)]
    for first in range(1000, 1000 + 9 * 4 * MOST_USES, 9):
        put(made, range(first, first + 9), Origin(worth=WORTH))
    assert not kept(made, range(45))
    made.close()


def test_a_later_process_begins_anew(tmp_path):
    """Which packs were read lately is all that files tell."""
    made = small(tmp_path)
    put(made, range(90))
    for _ in range(3):
        read(made, range(90))
    made.close()
    made = small(tmp_path)
    put(made, range(100, 109))
    assert len(kept(made, range(100, 109))) == 9
    made.close()


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_an_engine_tells_what_was_used_and_what_it_is_worth(tmp_path, name, monkeypatch):
    engine = make_engine(tiny_models.tiny_model(name), tmp_path)
    tier, origins = engine.scheduler.tier, {}
    assert tier.store._packs.least == engine.manager.allocator.worth.of_block(0, 4) > 1
    monkeypatch.setattr(
        tier.store, "put", lambda key, payload, origin: origins.update({key: origin})
    )
    for tail in range(2):
        engine.generate([[*tokens_of(0), tail]], **GREEDY)
    engine.generate([tokens_of(1)], **GREEDY)
    engine.close()
    used = [origin for origin in origins.values() if origin.is_used]
    assert used and all(origin.worth > 1 for origin in used)
    assert NO_ORIGIN.worth == 0
    never = [origin for origin in origins.values() if not origin.is_used]
    assert never and all(origin.worth == 0 for origin in never)
