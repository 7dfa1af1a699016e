"""scripts.decode_graphs: small runs of its tables, and what they count; never times."""

import json

import pytest

from mlx_paged.runner import batch
from scripts import decode_graphs

SMALL = ["--layers=2", "--steps=3", "--pairs=2"]


def run(capsys, *options):
    decode_graphs.main([*options, *SMALL])
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["bench"] == f"decode_graphs {options[0]}"
    assert len(lines) == 1 + len(result[options[0]])
    return result[options[0]]


@pytest.mark.slow
def test_graphs_are_compared_at_each_number_of_rows(capsys):
    for found, rows in zip(run(capsys, "graphs", "--rows", "1", "3"), (1, 3), strict=True):
        assert found["rows"] == rows
        ratio = found["compiled graph_us"] / found["plain graph_us"]
        assert found["compiled over plain"] == pytest.approx(ratio, abs=1e-3)
        assert found["mlx-lm over compiled"] > 0


def test_whole_steps_of_both_models(capsys):
    found = run(capsys, "steps", "--rows", "2")
    assert [(each["model"], each["rows"]) for each in found] == [("demo", 2), ("2", 2)]
    for each in found:
        assert each["lowest"] <= each["ratio"] <= each["highest"]


@pytest.mark.slow
def test_padding_is_compared_with_batches_that_have_none(capsys, monkeypatch):
    rows, steps = [], decode_graphs.Course.milliseconds

    def seen(course, num_steps):
        with course.within():
            rows.append(batch.row_bucket(33))
        return steps(course, num_steps)

    monkeypatch.setattr(decode_graphs.Course, "milliseconds", seen)
    (found,) = run(capsys, "padding", "--rows", "33")
    assert found["padding"] == 1
    assert sorted(rows) == [33, 33, 34, 34]
    assert batch.row_bucket(33) == 34


def test_every_part_of_a_step_takes_time(capsys):
    (found,) = run(capsys, "parts", "--rows", "2")
    assert set(found) == {"rows", "step", "other", *decode_graphs.PARTS}
    assert all(value > 0 for value in found.values())
    assert all(found[part] < found["step"] for part in decode_graphs.PARTS)


def test_a_thin_model_has_fewer_nodes_with_groups(capsys, monkeypatch):
    made, decoding = [], decode_graphs.decoding
    monkeypatch.setattr(decode_graphs, "decoding", lambda *all: made.append(all) or decoding(*all))
    groups, nodes = run(capsys, "thin")
    assert [(rows, steps) for _, rows, steps, _ in made] == 4 * [(1, 3 + decode_graphs.WARM_UP)]
    assert [groups["a step of"], nodes["a step of"]] == ["groups", "nodes"]
    assert groups["nodes"] < nodes["nodes"] / 4
    assert all(each[clock] > 0 for each in (groups, nodes) for clock in decode_graphs.CLOCKS)


def test_a_wrong_table_is_reported(capsys):
    with pytest.raises(SystemExit) as exit_info:
        decode_graphs.main(["graph"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ""
    assert err.startswith("decode_graphs: error: argument table: invalid choice: 'graph'")
