"""Records of the background are the first to go, and a directory's chains are counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from test_packs_and_store import ME, found, key_of, open_store, payload_of, run_main

from mlx_paged import Engine
from mlx_paged.kv_disk.packs import NO_ORIGIN, Origin, PackFiles, Record, allow_disk
from mlx_paged.loading import load_model

BACK = Origin(is_background=True)
OURS, OTHERS = range(100, 127), range(27)
"""Records of the background, and others: three packs each."""


def small(directory, *, max_bytes=102_500):
    made = open_store(directory, max_bytes=max_bytes)
    made._packs._pack_bytes = 10_000
    return made


def put(made, numbers, origin=NO_ORIGIN):
    for number in numbers:
        made.put(key_of(number), payload_of(number), origin)
    made.flush()


def filled(directory):
    made = small(directory)
    put(made, OTHERS)
    put(made, OURS, BACK)
    return made


def scanned(directory, kills=0) -> tuple[list[Record], set[int]]:
    """The records of a directory and its packs of the background; `kills` first blocks go then."""

    def scan():
        files = PackFiles(directory, 10**9)
        records = list(files.scan())
        for record in [each for each in records if each.origin.is_first][:kills]:
            files.kill(record.location)
        files.close()
        return records, files.background

    with ThreadPoolExecutor(1, initializer=allow_disk) as thread:
        return thread.submit(scan).result()


@pytest.mark.parametrize("reopens", [True, False])
def test_packs_of_the_background_go_first_though_they_are_newer(tmp_path, reopens):
    made = filled(tmp_path)
    if reopens:
        made.close()
        made = small(tmp_path)
    assert len(found(made, [*OTHERS, *OURS])) == 54
    made.close()
    made = small(tmp_path)
    put(made, range(27, 90))
    assert not [number for number in OURS if key_of(number) in made]
    assert all(key_of(number) in made for number in range(90))
    made.close()


def test_a_record_of_the_background_makes_no_other_go(tmp_path):
    """Where a pack of others is free, records of the background make their own go."""
    for others, num_kept, num_dropped in ((81, 9, 0), (90, 2, 25)):
        made = small(tmp_path / str(others))
        put(made, range(others))
        put(made, OURS, BACK)
        assert all(key_of(number) in made for number in range(others))
        kept = [number for number in OURS if key_of(number) in made]
        assert (len(kept), made.dropped["background"]) == (num_kept, num_dropped)
        assert made._packs.num_bytes <= made._packs.max_bytes
        made.close()


def test_what_was_read_is_of_the_background_no_more(tmp_path):
    made = filled(tmp_path)
    assert len(found(made, OURS[:1])) == 1
    made.flush()
    put(made, range(27, 81))
    kept = [number for number in OURS if key_of(number) in made]
    assert kept == [*OURS[:9]]
    put(made, range(200, 201), BACK)
    assert made._packs.background and 4 not in made._packs.background
    made.close()


def test_both_kinds_have_packs_of_their_own(tmp_path):
    made = small(tmp_path)
    for number in range(6):
        put(made, [number], BACK if number % 2 else NO_ORIGIN)
    made.close()
    records, background = scanned(tmp_path)
    kinds = {(each.location.pack, each.origin.is_background) for each in records}
    assert kinds == {(1, False), (2, True)} and background == {2}
    assert {each.identity for each in records} == {ME}


@pytest.mark.parametrize("priority", [0, "background"])
def test_blocks_of_background_requests_are_marked_and_chains_are_counted(
    tmp_path, capsys, priority
):
    engine = Engine(*load_model(), num_blocks=64, block_size=4, kv_disk=tmp_path)
    first, second = [*range(5, 25)], [*range(5, 17), *range(90, 102)]
    engine.generate([first, second], max_tokens=1, priority=priority)
    engine.close()
    assert run_main(str(tmp_path)) == 0
    told = capsys.readouterr().out.splitlines()
    assert ("of the background" in told[0]) == (priority != 0)
    assert told[0].endswith("2 chains")
    assert told[1:3] == [
        "  chain of 24 tokens, 12 of them shared",
        "  chain of 20 tokens, 12 of them shared",
    ]


def test_a_block_that_others_begin_with_is_not_marked(tmp_path):
    engine = Engine(*load_model(), num_blocks=64, block_size=4, kv_disk=tmp_path)
    text = [*range(5, 25)]
    engine.generate(text, max_tokens=1)
    engine.generate(text + [40] * 8, max_tokens=1, priority="background")
    engine.close()
    marks = [each.origin.is_background for each in scanned(tmp_path)[0]]
    assert marks.count(False) == 5 and marks.count(True) == 2


def test_chains_of_salts_and_without_a_beginning(tmp_path, capsys):
    """A salted text begins a chain of its own; a text whose first block is gone is in none."""
    engine = Engine(*load_model(), num_blocks=64, block_size=4, kv_disk=tmp_path)
    for salt in ("", "a", "b"):
        engine.generate([*range(5, 25)], max_tokens=1, cache_salt=salt)
    engine.close()
    scanned(tmp_path, kills=1)
    assert run_main(str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("14 records, 0.000 GB, 2 chains")
