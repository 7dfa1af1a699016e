"""scripts.published: small runs of its parts give tables whose cells are those of the benches."""

import json

import pytest

from scripts import published


def run(capsys, *options):
    published.main(options)
    *lines, last = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return lines, rows, json.loads(last)


@pytest.mark.sampled(2)
def test_blocks_are_served_in_turns_with_one_ceiling(capsys, monkeypatch):
    served = []
    real = published.serving.main

    def watched(options):
        served.append(next(o.split("=")[1] for o in options if o.startswith("--kv-block-size")))
        return real(options)

    small = ["--model=tiny", "--requests=3", "--no-static", "--arrivals-by-step=10"]
    monkeypatch.setattr(published, "SERVING", small)
    monkeypatch.setattr(published.serving, "main", watched)
    lines, (head, _, *rows), record = run(capsys, "blocks", "--rounds", "2")
    assert served == ["8", "16", "32", "16", "32", "8"]
    assert [line.partition(":")[0] for line in lines].count("Estimate") == 1
    assert lines[0].startswith("Estimate: ")
    assert [row[0] for row in rows] == ["8", "16", "32"] and rows[1][2] == "1.00 x"
    for row in rows:
        records = record["engines"][row[0]]
        assert len(records) == 2 and len(row) == len(head)
        assert float(row[6]) == pytest.approx(records[0]["kv_held_over_live"], abs=1e-3)
    assert len(record["load_average"]) == 6


@pytest.mark.sampled(2)
def test_the_gather_is_measured_beside_copies(capsys, monkeypatch):
    monkeypatch.setattr(published, "CONTEXTS", (40, 70))
    lines, (head, _, *rows), record = run(capsys, "gather", "--rounds", "1")
    assert lines[0].startswith("Ceilings: memory read")
    assert [row[0] for row in rows] == ["40", "70"]
    for row, case in zip(rows, record["op"]["cases"], strict=True):
        assert len(row) == len(head) and case["block_size"] == 16 and case["batch"] == 1
        ways = case["ways"]
        tax = ways["gather"]["speedup"] / ways["contiguous"]["speedup"]
        assert row[4] == f"{tax:.2f} x"
        assert list(case["copies_ms"]) == ["gather", "copy", "numpy gather", "numpy copy"]
        assert min(case["copies_ms"].values()) > 0


def test_a_run_of_many_sequences_gives_a_row_for_each_engine(capsys, monkeypatch):
    monkeypatch.setattr(published, "SERVING", ["--model=tiny", "--no-static"])
    monkeypatch.setattr(published, "ACTIVE", ["--requests=4", "--target-active=2"])
    lines, (head, _, *rows), record = run(capsys, "active", "--engines", "mlx_paged,mlx_lm")
    assert [row[0] for row in rows] == ["mlx_paged", "mlx_lm"]
    for row in rows:
        assert len(row) == len(head) == 8
        assert int(row[1]) == record["serving"]["work"]["output_tokens"]
    assert any(line.startswith("Estimate") for line in lines)


def test_the_op_has_a_cell_for_each_block_size(capsys, monkeypatch):
    monkeypatch.setattr(published, "OP_GRID", ["--dtypes=float32", "--batches=2", "--contexts=40"])
    _, (head, _, row), record = run(capsys, "op", "--rounds", "1")
    assert head[2:] == ["blocks of 8", "blocks of 16", "blocks of 32"]
    assert row[:2] == ["float32", "2"] and len(record["op"]["cases"]) == 3
    for cell, case in zip(row[2:], record["op"]["cases"], strict=True):
        way = case["ways"]["paged"]
        assert cell == f"{way['ms']:.2f} ms, {way['percent_of_read']:.0f} %"


def test_a_wrong_part_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        published.main(["everything"])
    err = capsys.readouterr().err
    assert exit_info.value.code == 2 and err.startswith("scripts.published: error: ")
    assert err.count("\n") == 1 and "invalid choice: 'everything'" in err
