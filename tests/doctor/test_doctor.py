"""The doctor's page, exit statuses, JSON and mistakes."""

import contextlib
import io
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import mlx_lm
import pytest

from mlx_paged import ops
from mlx_paged.doctor import command as doctor
from mlx_paged.doctor import flags, machine, sources, variants
from mlx_paged.doctor.__main__ import main
from mlx_paged.doctor.findings import Findings, run_check
from mlx_paged.doctor.variants import common_variants

NAMES = [
    *("machine", "common", "kernels", "sources", "products", "tokens", "acceptance"),
    *("order", "memory", "speed"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> SimpleNamespace:
    """What a quick run returns, prints and writes."""
    path = tmp_path_factory.mktemp("doctor") / "report.json"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["--quick", "--json", str(path)])
    return SimpleNamespace(
        status=status, out=out.getvalue(), err=err.getvalue(), json=json.loads(path.read_text())
    )


@pytest.fixture
def few_checks(monkeypatch) -> dict:
    """Two quick checks, which note that they ran, in place of the real ones."""
    ran: dict[str, bool] = {}

    def check(found: Findings, quick: bool) -> None:
        """a check"""
        ran[found.name] = quick
        found.lines.append(f"{found.name} was here")

    monkeypatch.setattr(doctor, "CHECKS", {"first": check, "second": check})
    monkeypatch.setattr(flags, "CHECKS", {"first": "a check", "second": "a check"})
    return ran


class TestQuickRun:
    @pytest.mark.heavy
    def test_all_is_right_and_stderr_has_what_common_models_need_first(self, quick):
        assert quick.status == 0
        heads = [line for line in quick.err.splitlines() if not line.startswith(" ")]
        for number, (line, name) in enumerate(zip(heads, NAMES, strict=True), start=1):
            assert line.startswith(f"{number} of {len(NAMES)} checks: {name}: ok (")
        first, _ = quick.err.split(f"3 of {len(NAMES)} checks")
        assert f"\n  {len(common_variants())} of {len(common_variants())} variants run" in first
        assert " ties, " in first and "\n  attention: the CPU kernels" in first
        assert not [line for line in quick.err.removeprefix(first).splitlines() if line[0] == " "]

    def test_the_page_is_one_page_and_names_every_check(self, quick):
        lines = quick.out.splitlines()
        assert lines[0].startswith("mlx_paged.doctor --quick: all checks are ok (")
        assert f"; mlx_paged {version('mlx-paged')}, mlx " in lines[0]
        assert "; decode at " in lines[0]
        heads = [line.split(":")[0] for line in lines[1:] if not line.startswith(" ")]
        assert heads == NAMES
        assert all(f"\n{name}: ok (" in quick.out for name in NAMES)
        assert len(lines) <= 48 and quick.out.isascii()

    def test_the_page_says_what_answered(self, quick):
        assert f"variants run, on the CPU kernels ({ops.cpu_features()})" in quick.out
        assert "attention: the CPU kernels" in quick.out

    def test_the_json_has_every_number(self, quick):
        report = quick.json
        assert (report["ok"], report["num_wrong"], report["quick"]) == (True, 0, True)
        assert list(report["checks"]) == NAMES
        for name, found in report["checks"].items():
            keys = {"ok", "name", "lines", "failures", "numbers", "seconds"}
            keys |= {"num_wrong", "verdict", "counted", "unfinished"}
            assert found.keys() == keys and found["num_wrong"] == 0
            assert (found["ok"], found["name"], found["failures"]) == (True, name, [])
            assert found["lines"] and found["seconds"] >= 0
        (play,) = report["checks"]["common"]["numbers"]["plays"]
        assert play["tokens"] > 50 and play["ties"] < 5 and play["chunk_only_steps"] > 0
        kernels = report["checks"]["kernels"]["numbers"]
        assert kernels["variants"] == kernels["run"] > 100
        for dtype in ("float32", "float16", "bfloat16"):
            assert 0 < kernels[dtype]["worst_error"] <= kernels[dtype]["tolerance"]
        assert report["checks"]["machine"]["numbers"]["built with"] == ops.BUILT_WITH
        assert report["checks"]["sources"]["numbers"]["assembled"] > 20
        for play in (check := report["checks"])["tokens"]["numbers"]["plays"]:
            assert min(play["prefix_hit_tokens"], play["cow_clones"], play["tokens"]) > 0
        for play in check["order"]["numbers"]["plays"]:
            assert min(play["preemptions"], play["cow_clones"], play["chunk_only_steps"]) > 0
        rates = check["speed"]["numbers"]["4 x 2048 tokens"]
        assert rates.keys() == {"read", "MLX contiguous", "mlx_paged"} and min(rates.values()) > 0
        decode = check["speed"]["numbers"]["decode_ms"]
        assert decode["plain"] > 0 and decode["compiled"] > 0
        assert decode["chosen"] in ("plain", "compiled")
        step = check["speed"]["numbers"]["step_ms"]
        assert min(step["tick_ms"], step["launch_ms"], step["async_eval_ms"]) > 0


class TestStatus:
    def test_a_check_that_crashes_fails_and_the_others_run(
        self, few_checks, monkeypatch, tmp_path, capsys
    ):
        def crash(found: Findings, quick: bool) -> None:
            found.lines.append("half of it is done")
            raise RuntimeError(
                "[metal::Device] Unable to build metal library\nline 3: no such type"
            )

        doctor.CHECKS["crash"] = crash
        doctor.CHECKS["last"] = doctor.CHECKS["first"]
        path = tmp_path / "report.json"
        assert main(["--json", str(path)]) == 1
        out = capsys.readouterr().out
        assert out.startswith("mlx_paged.doctor: FAILED: crash (")
        assert "half of it is done" in out
        assert "FAILED: RuntimeError: [metal::Device] Unable to build metal library" in out
        assert "line 3: no such type" in out
        assert list(few_checks) == ["first", "second", "last"]
        report = json.loads(path.read_text())
        assert not report["ok"] and not report["checks"]["crash"]["ok"]

    def test_only_one_check_runs(self, few_checks, capsys):
        assert main(["--only", "second", "--quick"]) == 0
        assert few_checks == {"second": True}
        assert "first" not in capsys.readouterr().out

    def test_after_ctrl_c_the_page_has_what_was_found(self, few_checks, tmp_path, capsys):
        def interrupted(found: Findings, quick: bool) -> None:
            found.lines.append("half of it is done")
            for number in found.progress(range(9), "round"):
                if number == 4:
                    raise KeyboardInterrupt

        doctor.CHECKS.update(second=interrupted, third=doctor.CHECKS["first"])
        path = tmp_path / "report.json"
        try:
            status = main(["--json", str(path)])
        except KeyboardInterrupt:
            pytest.fail("Ctrl-C was not caught")
        assert status == 130
        out, err = capsys.readouterr()
        assert err == "1 of 3 checks: first: ok (0.0 s)\ninterrupted\n" and list(few_checks) == [
            "first"
        ]
        head, *rest = [line.partition(" (")[0] for line in out.splitlines()]
        assert head == "mlx_paged.doctor: not finished: second; not begun: third"
        assert rest == [
            *("first: ok", "  first was here", "second: not finished", "  half of it is done"),
            "  not finished: 4 of 9 rounds until Ctrl-C",
        ]
        report = json.loads(path.read_text())["checks"]
        assert report["first"]["ok"] and not report["second"]["ok"] and "third" not in report

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--slow"], "unrecognized arguments: --slow"),
            (["--only", "kernel"], "simplest or a variant, got 'kernel'"),
            (["--only"], "--only: expected one argument"),
            (
                ["--json", "/no/such/folder/report.json"],
                "report.json: No such file",
            ),
        ],
    )
    def test_a_mistake_is_one_line_before_the_work(self, arguments, message, few_checks, capsys):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        out, err = capsys.readouterr()
        assert exit_info.value.code == 2 and out == ""
        assert err.startswith("mlx_paged.doctor: error: ") and err.count("\n") == 1
        assert message in err
        assert few_checks == {}

    def test_the_page_shows_some_of_many_failures(self):
        found = Findings("kernels", failures=[f"variant {i}" for i in range(100)])
        text = found.text()
        assert "variant 7" in text and "variant 8" not in text and "FAILED: 92 more" in text


class TestMachine:
    def test_another_mlx_than_at_build_time_fails(self, monkeypatch):
        monkeypatch.setattr(ops, "BUILT_WITH", {"mlx": "0.32.3", "nanobind": "3.1.0"})
        (failure,) = run_check(Findings("machine"), machine.check_machine, True).failures
        assert "expected 0.32.3, with which mlx_paged was built" in failure

    def test_an_untested_mlx_lm_fails(self, monkeypatch):
        monkeypatch.setattr(mlx_lm, "__version__", "0.33.0")
        (failure,) = run_check(Findings("machine"), machine.check_machine, True).failures
        assert failure.startswith("mlx-lm is 0.33.0: expected ")

    def test_a_module_that_rejects_arrays_fails(self, monkeypatch):
        def reject(*arguments: object) -> None:
            raise TypeError("gather_blocks(): incompatible function arguments")

        monkeypatch.setattr(ops, "gather_blocks", reject)
        (failure,) = run_check(Findings("machine"), machine.check_machine, True).failures
        assert failure.startswith("TypeError: gather_blocks()")

    @pytest.mark.parametrize(
        ("most", "variable", "path"),
        [
            (8, None, "K, through block tables, for up to 8 tokens of a sequence; for more: "),
            (0, "gather", "gathered blocks, MLX's attention (MLX_PAGED_ATTENTION is gather)"),
            (2**31, "paged", "K, through block tables (MLX_PAGED_ATTENTION is paged)"),
            (2**31, None, "K, through block tables (the device is a CPU)"),
        ],
    )
    def test_the_path_of_attention_is_named(self, most, variable, path, monkeypatch):
        monkeypatch.delenv("MLX_PAGED_ATTENTION", raising=False)
        if variable is not None:
            monkeypatch.setenv("MLX_PAGED_ATTENTION", variable)
        monkeypatch.setattr(machine, "max_paged_queries", lambda: most)
        monkeypatch.setattr(machine, "kernels_in_use", lambda: "K")
        assert machine.attention_path().startswith(path)


def found_with_xcrun(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Findings:
    """What the check of sources finds where `xcrun` is this script."""
    xcrun = folder / "xcrun"
    xcrun.write_text(script)
    xcrun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return run_check(Findings("sources"), sources.check_sources, True)


class TestSources:
    @pytest.mark.slow
    def test_without_xcode_nothing_is_compiled(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        found = run_check(Findings("sources"), sources.check_sources, True)
        assert found.ok and found.numbers["compiled"] == 0
        assert "none compiled: no `xcrun` here" in found.text()

    @pytest.mark.slow
    def test_an_xcode_without_a_compiler_compiles_nothing(self, monkeypatch, tmp_path):
        found = found_with_xcrun(
            monkeypatch,
            tmp_path,
            '#!/bin/sh\n[ "$1" = --find ] && exit 0\n'
            "echo \"error: cannot execute tool 'metal'\" >&2; exit 1\n",
        )
        assert found.ok and found.numbers["compiled"] == 0
        assert "--version`: error: cannot execute tool 'metal'" in found.text()

    @pytest.mark.slow
    def test_a_source_that_xcode_refuses_is_named(self, monkeypatch, tmp_path):
        found = found_with_xcrun(
            monkeypatch,
            tmp_path,
            '#!/bin/sh\nfor source; do :; done\n[ "$source" = --version ] && exit 0\n'
            'case "$source" in *copy_blocks*) echo "line 3: no such type" >&2; exit 1;; esac\n'
            'exec test -s "$source"\n',
        )
        assert [failure.split(":")[0][:11] for failure in found.failures] == ["copy_blocks"]
        assert "no such type" in found.failures[0]
        assert found.numbers["compiled"] == found.numbers["assembled"] - 1 > 20

    @pytest.mark.parametrize(
        ("macos", "language"),
        [
            *(
                ("14.0", "3.1"),
                ("14.8.2", "3.1"),
                ("15.7", "3.2"),
                ("26.2", "4.0"),
                ("27.0", "4.1"),
            ),
            *(("28.1", "4.1"), ("16.0", "3.2"), ("13.6", "3.1"), ("", "3.1"), ("next", "3.1")),
        ],
    )
    def test_the_version_is_that_of_mlx(self, macos, language):
        assert sources.language_of(macos) == language

    @pytest.mark.parametrize(
        ("macos", "known", "compiled_as"),
        [
            ("27.0", "4.1", "4.1"),
            ("27.0", "3.2", "3.2"),
            ("26.4", "4.0", "4.0"),
            ("15.1", "3.1", "3.1"),
        ],
    )
    def test_sources_are_compiled_in_the_version_of_the_system(
        self, macos, known, compiled_as, monkeypatch, tmp_path
    ):
        """Or in the newest one that Xcode knows."""
        monkeypatch.setattr(sources, "all_variants", lambda: [*variants.all_variants()][:1])
        (tmp_path / "sw_vers").write_text(
            f'#!/bin/sh\n[ "$1" = -productVersion ] && echo {macos}\n'
        )
        (tmp_path / "sw_vers").chmod(0o755)
        found = found_with_xcrun(
            monkeypatch,
            tmp_path,
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor given; do\n'
            'case "$given" in -std=metal*) version=${given#-std=metal};; esac\ndone\n'
            f'[ "$given" = --version ] && exit 0\n[ "${{version%.*}}${{version#*.}}" -le '
            f'{known.replace(".", "")} ] || {{ echo "invalid value" >&2; exit 1; }}\n',
        )
        assert found.ok and f"compiled by Xcode as Metal {compiled_as}" in found.text()
        is_older = compiled_as != sources.language_of(macos)
        assert ("which this Xcode does not know" in found.text()) is is_older
        last = (tmp_path / "asked").read_text().splitlines()[-1]
        assert f"-std=metal{compiled_as} " in last
