"""Records are found as they were written, or not at all; a directory has one user and a size."""

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from mlx_paged.kv_disk import packs, store
from mlx_paged.kv_disk.__main__ import main
from mlx_paged.kv_disk.packs import HEADER, PackFiles
from mlx_paged.kv_disk.store import DiskStore

ME, OTHER = bytes(32), bytes([7]) * 32


def key_of(number: int) -> bytes:
    return number.to_bytes(24, "little")


SIZE = 5 * packs.ROW + 1000


def payload_of(number: int, size: int = 1000) -> bytes:
    return np.random.default_rng(number).bytes(size)


def rows_of_zeros(count: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    return (np.zeros((count, num_bytes), np.uint8),) * 2


def open_store(directory: Path, max_bytes: int = 10**8, identity: bytes = ME) -> DiskStore:
    made = DiskStore(PackFiles(directory, max_bytes), identity, rows_of_zeros)
    made.flush()
    return made


def filled(directory: Path, count: int = 10, size: int = 1000, **options) -> None:
    made = open_store(directory, **options)
    for number in range(count):
        made.put(key_of(number), payload_of(number, size))
    made.close()


def found(made: DiskStore, numbers) -> dict[int, bytes]:
    load = made.load([key_of(number) for number in numbers])
    for future in load.futures:
        future.result()
    return {int.from_bytes(k, "little"): bytes(rows[row]) for k, (rows, row) in load.found.items()}


def small_packs(directory: Path) -> DiskStore:
    """A store of ten packs of 10,000 bytes, and 2 records more: 60 records of 1,000 bytes are
    written, nine a pack."""
    made = open_store(directory, max_bytes=102_500)
    made._packs._pack_bytes = 10_000
    for number in range(60):
        made.put(key_of(number), payload_of(number))
    made.flush()
    return made


def the_pack(directory: Path) -> Path:
    (path,) = directory.glob("*.kv")
    return path


def test_what_was_put_is_found_by_a_later_store_and_files_are_private(tmp_path):
    filled(tmp_path / "new")
    made = open_store(tmp_path / "new")
    assert len(made) == 10 and key_of(3) in made and key_of(99) not in made
    assert found(made, range(12)) == {number: payload_of(number) for number in range(10)}
    made.close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "new").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_record_that_is_not_written_yet_is_found(tmp_path):
    made = open_store(tmp_path)
    blocked = threading.Event()
    made._writer.submit(blocked.wait)
    made.put(key_of(1), payload_of(1))
    assert key_of(1) in made and found(made, [1]) == {1: payload_of(1)}
    blocked.set()
    made.close()


def test_equal_keys_are_written_once(tmp_path):
    filled(tmp_path)
    size = the_pack(tmp_path).stat().st_size
    assert size == len(packs.FILE_MAGIC) + 10 * (HEADER.size + 1000)
    filled(tmp_path)
    assert the_pack(tmp_path).stat().st_size == size


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_record_is_noticed(tmp_path):
    filled(tmp_path, count=1, size=SIZE)
    path = the_pack(tmp_path)
    whole = path.read_bytes()
    start = len(packs.FILE_MAGIC)
    header = range(8 * start, 8 * (start + HEADER.size), 11)
    payload = range(8 * (start + HEADER.size), 8 * len(whole), 1009)
    places = [*header, *payload, *range(8 * len(whole) - 99, 8 * len(whole), 11)]
    for bit in places:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        made = open_store(tmp_path)
        assert found(made, [0]) == {}, bit
        assert made.dropped.total() == 1
        made.close()
        path.write_bytes(whole)
    made = open_store(tmp_path)
    assert found(made, [0]) == {0: payload_of(0, SIZE)}
    made.close()


@pytest.mark.parametrize("length", [8, 512, packs.ROW, 2 * packs.ROW])
def test_what_moves_within_a_payload_is_noticed(length):
    """Within rows of the matrix that is added up, between them, and whole rows."""
    payload = np.frombuffer(payload_of(0, 9 * packs.ROW + 1000), np.uint8)
    swapped = []
    for start in range(0, len(payload) - 2 * length, max(length, 72)):
        for distance in (length, packs.ROW, 2 * packs.ROW, 3 * packs.ROW + 512):
            other, stop = start + distance, start + distance + length
            if distance >= length and stop <= len(payload):
                changed = payload.copy()
                changed[start : start + length], changed[other:stop] = (
                    payload[other:stop],
                    payload[start : start + length],
                )
                swapped.append(changed)
    sums = packs._sums(np.array([payload, *swapped]))
    assert len(swapped) > 5 and sums[0] not in sums[1:]
    assert sums[0] == packs._sums(payload[None])[0]


def test_a_damaged_record_is_counted_once_and_stays_removed(tmp_path):
    filled(tmp_path)
    path = the_pack(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(packs.FILE_MAGIC) + 4 * (HEADER.size + 1000) + HEADER.size + 500] ^= 1
    path.write_bytes(content)
    made = open_store(tmp_path)
    assert found(made, range(10)).keys() == set(range(10)) - {4}
    assert found(made, [4]) == {} and made.dropped == {"checksum": 1} and key_of(4) not in made
    made.close()
    made = open_store(tmp_path)
    assert len(made) == 9 and not made.dropped
    made.put(key_of(4), payload_of(4))
    made.close()
    made = open_store(tmp_path)
    assert found(made, [4, 5]) == {4: payload_of(4), 5: payload_of(5)}
    made.close()


@pytest.mark.parametrize("cut", [1, HEADER.size + 999, HEADER.size + 1001, 3000])
def test_records_before_a_torn_end_are_found(tmp_path, cut):
    filled(tmp_path)
    path = the_pack(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    made = open_store(tmp_path)
    lost = -(-cut // (HEADER.size + 1000))
    assert found(made, range(10)).keys() == set(range(10 - lost))
    assert made.dropped == {"truncated": 1}
    made.close()


def test_records_of_another_identity_or_place_are_not_found(tmp_path):
    filled(tmp_path)
    made = open_store(tmp_path, identity=OTHER)
    assert len(made) == 0 and found(made, range(10)) == {}
    made._index[key_of(1)] = packs.Location(1, len(packs.FILE_MAGIC), 1000)
    assert found(made, [1]) == {} and made.dropped == {"another": 1}
    made.close()


def test_a_directory_in_use_is_refused_by_name(tmp_path):
    made = open_store(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*process {os.getpid()} uses"):
        PackFiles(tmp_path, 1)
    made.close()
    PackFiles(tmp_path, 1).close()


@pytest.mark.slow
def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import sys, time; from mlx_paged.kv_disk.packs import PackFiles;"
        "files = PackFiles(sys.argv[1], 1); print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as user:
        user.stdout.readline()
        with pytest.raises(ValueError, match=f"process {user.pid} uses"):
            PackFiles(tmp_path, 1)
        user.kill()
    PackFiles(tmp_path, 1).close()


def test_a_file_is_refused_as_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="expected a directory that can be written"):
        PackFiles(tmp_path / "file", 1)


def test_the_packs_unused_longest_go_first_and_the_size_is_kept(tmp_path):
    made = small_packs(tmp_path)
    assert found(made, [0]) == {0: payload_of(0)}  # its pack is the latest used
    made.flush()
    for number in range(60, 130):
        made.put(key_of(number), payload_of(number))
    made.flush()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 100_000
    kept = found(made, range(130))
    assert 0 in kept and 20 not in kept and 129 in kept
    assert all(content == payload_of(number) for number, content in kept.items())
    assert len(kept) == len(made), "the index names what is gone"
    made.close()


def test_the_order_of_use_outlives_the_process(tmp_path):
    made = small_packs(tmp_path)
    now = time.time()
    for path in tmp_path.glob("*.kv"):
        os.utime(path, (now - 100, now - 100))
    found(made, [0])
    made.close()
    made = open_store(tmp_path, max_bytes=100_000)
    assert list(made._packs.packs)[-1] == 1
    made.close()


def test_the_pack_that_is_written_does_not_keep_others_when_all_are_read_later(tmp_path):
    made = small_packs(tmp_path)
    for number in range(60, 91):
        made.put(key_of(number), payload_of(number))
    made.flush()
    assert len(found(made, range(90))) == 90  # of all packs but the last one
    made.flush()
    for number in (98, 99):
        made.put(key_of(number), payload_of(number))
    made.flush()
    assert 99_000 > made._packs.num_bytes > 90_000 and key_of(99) in made
    made.close()


def test_a_store_smaller_than_a_pack_keeps_to_its_size(tmp_path):
    made = open_store(tmp_path, max_bytes=5000)
    for number in range(20):
        made.put(key_of(number), payload_of(number))
    made.flush()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= 5000
    assert found(made, [19]) == {19: payload_of(19)}
    made.close()


def test_a_torn_record_counts_as_bytes_of_the_store(tmp_path):
    made = open_store(tmp_path)
    torn = lambda file, buffers, offset: os.pwrite(file, b"".join(buffers)[:700], offset)  # noqa: E731
    with mock.patch.object(os, "pwritev", torn), mock.patch.object(store, "PAUSE", 0.0):
        for number in range(3):
            made.put(key_of(number), payload_of(number))
            made.flush()
    sizes = [path.stat().st_size for path in tmp_path.glob("*.kv")]
    assert made.dropped == {"full": 3} and made._packs.num_bytes == sum(sizes) > 2100
    made.close()


def test_neighbours_of_several_sizes_are_read_at_once_into_memory_that_was_made_for_them(tmp_path):
    made, sizes = open_store(tmp_path), [1000, 500] * 4
    for number, size in enumerate(sizes):
        made.put(key_of(number), payload_of(number, size))
    made.close()
    made, memory = open_store(tmp_path), []

    def make_rows(count, num_bytes):
        memory.append(np.zeros((count, num_bytes), np.uint8))
        return memory[-1], memory[-1]

    made._make_rows = make_rows
    with mock.patch.object(os, "preadv", mock.Mock(side_effect=os.preadv)) as preadv:
        contents = found(made, range(8))
    assert contents == {number: payload_of(number, size) for number, size in enumerate(sizes)}
    assert [rows.shape for rows in memory] == [(4, 1000), (4, 500)]
    assert memory[0][3].tobytes() == payload_of(6) and memory[1][0].tobytes() == payload_of(1, 500)
    assert preadv.call_count == store.READERS
    made.close()


def test_a_day_has_a_budget_which_a_restart_does_not_renew(tmp_path):
    with mock.patch.object(store, "DAILY_WRITES", 0.0001):
        filled(tmp_path, count=8)  # of 10,000 bytes
        made = open_store(tmp_path)
        for number in range(8, 20):
            made.put(key_of(number), payload_of(number))
        made.flush()
        assert 9 <= len(made) <= 10 and made.dropped["budget"] == 20 - len(made)
        made.close()
        with mock.patch.object(packs, "time", lambda: time.time() + 90_000):
            made = open_store(tmp_path)
            made.put(key_of(30), payload_of(30))
            made.flush()
            assert key_of(30) in made
            made.close()


def test_a_full_disk_stops_writing_for_a_while_and_hurts_nothing(tmp_path):
    filled(tmp_path)
    made = open_store(tmp_path)
    full = os.statvfs_result((4096, 4096, 10**6, 0, 49_999, 0, 0, 0, 0, 255))
    with mock.patch.object(os, "statvfs", lambda path: full):
        made.put(key_of(50), payload_of(50))
        made.flush()
    assert made.dropped == {"full": 1} and not made.has_room and key_of(50) not in made
    assert len(found(made, range(10))) == 10
    with mock.patch.object(store, "PAUSE", 0.0):
        made._resume = 0.0
        with mock.patch.object(os, "pwritev", side_effect=OSError(errno.EIO, "broken")):
            made.put(key_of(51), payload_of(51))
            made.flush()
        assert made.dropped["unwritable"] == 1
        made.put(key_of(52), payload_of(52))
        made.flush()
    assert found(made, [51, 52]) == {52: payload_of(52)}
    made.close()


@pytest.mark.parametrize(
    ("reason", "error", "told"),
    [
        ("full", OSError(errno.ENOSPC, "No space left"), "No space left: a write is tried again"),
        ("full", OSError(errno.EDQUOT, "Quota exceeded"), "Quota exceeded: a write is tried"),
        ("unwritable", OSError(errno.EROFS, "Read-only"), "Read-only: a write is tried again"),
        ("budget", None, "times its size was written in 24 hours"),
    ],
)
def test_the_log_tells_once_why_nothing_is_written(
    tmp_path, monkeypatch, caplog, reason, error, told
):
    monkeypatch.setattr(store, "PAUSE", 0.0)
    if error is None:
        monkeypatch.setattr(store, "DAILY_WRITES", 0)
    made = open_store(tmp_path)
    with mock.patch.object(os, "pwritev", side_effect=error):
        for number in range(5):
            made.put(key_of(number), payload_of(number))
            made.flush()
    assert made.dropped == {reason: 5}
    made.close()
    (line,) = caplog.messages
    assert line.startswith(f"K/V on disk {tmp_path}: ") and told in line


def test_no_thread_but_the_stores_waits_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "_thread", threading.local())  # a command may have run here
    filled(tmp_path)
    files = PackFiles(tmp_path, 10**6)
    place = packs.Location(1, len(packs.FILE_MAGIC), 1000)
    wanted, rows = [(key_of(1), place, 0)], {1000: np.zeros((1, 1000), np.uint8)}
    for call in (
        lambda: next(files.scan()),
        lambda: files.append(ME, key_of(1), b"1"),
        lambda: next(files.read(wanted, rows, ME)),
        lambda: files.kill(place),
        lambda: files.remove(1),
        lambda: files.used({1}),
    ):
        with pytest.raises(AssertionError, match="a disk call on a thread that must not wait"):
            call()
    files.close()


def test_the_command_lists_verifies_and_trims(tmp_path, capsys):
    filled(tmp_path)
    content = bytearray(the_pack(tmp_path).read_bytes())
    content[-1] ^= 1
    the_pack(tmp_path).write_bytes(content)
    assert run_main(str(tmp_path)) == 0
    assert "model 000000000000: 10 records" in capsys.readouterr().out
    assert run_main(str(tmp_path), "--verify") == 1
    assert "damaged (checksum): 1" in capsys.readouterr().out
    assert run_main(str(tmp_path), "--verify") == 0
    assert ": 9 records" in capsys.readouterr().out
    assert run_main(str(tmp_path), "--trim", "0") == 0
    assert not list(tmp_path.glob("*.kv"))
    assert run_main(str(tmp_path / "missing")) == 2
    assert "no such directory" in capsys.readouterr().err
    made = open_store(tmp_path)
    assert run_main(str(tmp_path)) == 2
    made.close()


def run_main(*arguments: str) -> int:
    """The command in a thread of its own, which may wait for the disk."""
    status: list[int] = []

    def run() -> None:
        try:
            status.append(main(arguments))
        except SystemExit as exit:
            status.append(int(exit.code or 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return status[0]


def test_damage_says_why():
    assert packs.damage(b"") == "truncated" and packs.damage(bytes(HEADER.size)) == "header"
