"""scripts.publish: the pages have the tables of the committed results, and only their figures."""

import json
import re
import subprocess

import pytest

from scripts import publish, published_tables
from scripts.published_tables import PAGES, PARTS, RESULTS, written

BLOCK = re.compile(r"<!-- published: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
FIGURE = re.compile(
    r"\d ?(?:x\b|ms\b|us\b|s\b|%|tokens/s|GFLOP|[KMG]i?B\b|GB/s)|\d times|\| \d+\.\d"
)
"""A measured figure."""


def results():
    if not RESULTS.exists():
        pytest.skip("no results are published yet")
    return json.loads(RESULTS.read_text())


def fake(engines, **values):
    """What bench.serving prints of engines, by name their tokens a second in each round."""
    spread = {"p50": 10.0, "p99": 20.0, "max": 30.0}
    rows = {
        name: {
            "output_tokens_per_sec": sorted(rates)[len(rates) // 2],
            "continuous_steady_tokens_per_sec": sorted(rates)[len(rates) // 2],
            "each_round": {
                "output_tokens_per_sec": rates,
                "continuous_steady_tokens_per_sec": rates,
            },
            **dict.fromkeys(("ttft_ms", "itl_ms", "tick_ms"), spread),
            "kv_held_over_live": 1.5,
            "kv_held_peak_mib": 2.0,
            "streams": 4,
            "streams_as_first": 3,
        }
        for name, rates in engines.items()
    }
    return {"engines": rows, "gemm_gflops": 99.0, "load_average": 0.1, **values}


def test_the_pages_have_the_tables_of_the_results():
    for page, text in written(results()).items():
        assert page.read_text() == text, f"{page.name}: run `python -m scripts.publish --write`"


def test_every_part_is_on_the_page_once():
    texts = [each for page in PAGES for each in BLOCK.findall(page.read_text())]
    assert sorted(name for name, _ in texts) == sorted([*PARTS, "machine", "headline"])
    missing = {name for name, text in texts if text.strip() == "Not measured."}
    assert set(results()["parts"]) | missing == set(PARTS)
    for name, part in results()["parts"].items():
        assert tuple(run["command"] for run in part["runs"]) == PARTS[name].commands


def test_the_page_has_no_figure_of_another_run():
    text = BLOCK.sub("", published_tables.PAGES[1].read_text())
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("0.15 cores", "")
    assert FIGURE.findall(text) == []


def test_the_readme_has_speeds_in_its_published_table_only():
    text = BLOCK.sub("", published_tables.PAGES[0].read_text())
    assert re.findall(r"\d[\d.]* ?(?:tokens/s|x mlx|x llama|ms\b)|tokens/s[^|]*\| *\d", text) == []


@pytest.mark.parametrize("text", ["it takes 12 ms", "3.1x", "| 1.5 |", "2 GB/s", "85 % of it"])
def test_a_figure_is_found(text):
    assert FIGURE.search(text)


def test_ratios_are_of_medians_with_the_range_of_rounds():
    record = fake({"mlx_paged": [300.0, 200.0, 400.0], "mlx_lm": [100.0, 100.0, 50.0]})
    assert published_tables.over(record, "mlx_lm") == "3.00x (2.00 to 8.00)"
    lines = list(published_tables.served(record))
    assert lines[2] == "| output tokens/s | 300 | 100 |"
    assert lines[3] == "| mlx_paged over it: medians (rounds) |  | 3.00x (2.00 to 8.00) |"


def timed(model, engines):
    """What bench.serving prints of streams, by name their first tokens and further ones, in ms."""
    record = fake({name: [2.0, 4.0] for name in engines}, model=model, work={"requests": 4})
    for name, (first, further) in engines.items():
        record["engines"][name]["each_round"] |= {"ttft_ms": first, "tpot_ms": further}
    return record


def test_a_lone_prompts_ratios_are_of_times():
    engines = {"mlx_paged": ([500.0, 500.0], [20.0, 10.0]), "other": ([1000.0, 1500.0], [20, 20])}
    lines = list(published_tables.lone_prompts(timed("a", engines), timed("b", engines)))
    assert lines[2] == "| a | mlx_paged | 0.50 |  | 15.0 |  | 3 of 4 |"
    assert lines[3] == (
        "| a | other | 1.25 | 2.50x (2.00 to 3.00) | 20.0 | 1.33x (1.00 to 2.00) | 3 of 4 |"
    )
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| b"] * 2


def test_chats_have_the_steady_phase_before_the_whole_run():
    record = timed("a", {"mlx_paged": ([1], [1]), "other": ([1], [1])})
    record["engines"]["mlx_paged"]["each_round"]["output_tokens_per_sec"] = [8.0, 8.0]
    record["engines"]["mlx_paged"]["output_tokens_per_sec"] = 8.0
    lines = list(published_tables.chats(record))
    assert lines[2] == "| 4 | a | mlx_paged | 4.00 |  | 8.00 |  |"
    assert lines[3] == (
        "| 4 | a | other | 4.00 | 1.00x (1.00 to 1.00) | 4.00 | 2.67x (2.00 to 4.00) |"
    )


def test_quantized_kv_is_beside_the_same_op_in_bfloat16():
    ways = {"paged": {"ms": 2.0}, "plain": {"ms": 3.0, "speedup": 1.5}}
    case = {"heads": "8:2:64", "kv_bits": 4, "batch": 8, "ways": ways}
    lines = list(published_tables.quantized_kv({"cases": [case]}))
    assert lines[2:] == ["| 8:2:64 | 4 | 8 | 2.000 | 3.000 | 1.50x |"]


def test_the_headline_takes_the_fastest_llama_cpp():
    record = fake({"mlx_paged": [9.0], "mlx_lm": [1.0], "llama_cpp": [3.0], "llama_cpp_f16": [6.0]})
    assert published_tables.rates(record) == ["9.00", "1.00: 9.00x", "6.00: 1.50x"]
    assert published_tables.rates(fake({"mlx_paged": [9.0]})) == ["9.00", "", ""]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a product, a bench and no results."""
    for folder in ("mlx_paged", "bench", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("1")
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "RESULTS", tmp_path / "docs" / "benchmarks.json")
    monkeypatch.setattr(publish, "real_model", lambda name: None)
    monkeypatch.setattr(publish, "version", lambda package: "1")
    monkeypatch.setattr(publish.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(publish, "written", lambda results: {})
    monkeypatch.setattr(publish, "PARTS", {name: PARTS[name] for name in ("stalls", "joins")})
    commands = ["init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm a"]
    for command in commands:
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def commit(repository, file):
    (repository / file).write_text("2")
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "b"]
    subprocess.run(["git", *words], cwd=repository, check=True)


def test_parts_are_resumed_and_begin_anew_with_another_product(repository, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(publish, "run", lambda command: ran.append(command) or {})
    monkeypatch.setattr(publish, "busy_seconds", lambda: None)
    monkeypatch.setattr(publish, "HEADLINE", ("joins", "stalls"))

    def parts():
        return list(json.loads(publish.RESULTS.read_text())["parts"])

    assert publish.main(["--only", "joins"]) == 0 and parts() == ["joins"]
    assert "README's table stays: not measured: stalls\n" in capsys.readouterr().out
    commit(repository, "docs/file")
    assert publish.main([]) == 0 and parts() == ["joins", "stalls"]
    assert [command.split()[0] for command in ran] == ["bench.admission", "bench.stalls"]
    commit(repository, "mlx_paged/file")
    assert publish.main(["--only", "stalls"]) == 0 and parts() == ["stalls"]


def test_a_product_with_changes_is_refused(repository, capsys):
    (repository / "bench" / "file").write_text("3")
    assert publish.main([]) == 1
    assert capsys.readouterr().err == (
        "scripts.publish: bench/file has changes: expected a commit of them\n"
    )


def test_what_was_measured_beside_others_is_measured_again(monkeypatch, capsys):
    loads = iter([0.4, 0.2, 0.05])
    monkeypatch.setattr(publish, "measured", lambda commands: {"others_cores": next(loads)})
    assert publish.quietest(["bench"], 2) == {"others_cores": 0.2, "tries": 2}
    assert publish.quietest(["bench"], 2) == {"others_cores": 0.05, "tries": 1}
    assert capsys.readouterr().err.count("other processes used 0.4") == 1


@pytest.mark.slow
def test_a_bench_that_fails_is_one_line(monkeypatch):
    with pytest.raises(RuntimeError, match=r"bench.stalls --rounds x: status 2: .*--rounds"):
        publish.run("bench.stalls --rounds x")


def test_a_wrong_part_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info:
        publish.main(["--only", "everything"])
    err = capsys.readouterr().err
    assert exit_info.value.code == 2 and err.startswith("scripts.publish: error: ")
    assert err.count("\n") == 1 and "invalid choice: 'everything'" in err


def test_a_part_that_is_missing_says_so_and_leaves_the_readme_alone():
    machine = dict.fromkeys(("cpu", "system", "mlx", "mlx-lm", "llama-cpp-python"), "a")
    results = {"commit": "b" * 40, "machine": machine | {"cores": 2}, "parts": {}}
    readme, page = written(results).items()
    assert readme[1] == readme[0].read_text()
    assert dict(BLOCK.findall(page[1]))["joins"].strip() == "Not measured."
    assert "Commit `bbbbbbbbbbbb`." in page[1]
