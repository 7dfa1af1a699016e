"""The doctor's checks of MLX's own products and of memory, and checks in processes of their own."""

import json
import platform
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_paged import ops
from mlx_paged.attention.paths import has_matrix_units
from mlx_paged.command_buffers import OPERATIONS
from mlx_paged.doctor import apart, buffers, findings, flags, memory, products
from mlx_paged.doctor import command as doctor
from mlx_paged.doctor.__main__ import main
from mlx_paged.doctor.findings import Findings, run_check
from mlx_paged.engine.engine import Engine
from tests.support import TIMEOUT


class TestProducts:
    def test_wrong_attention_of_mlx_is_a_wrong_number(self, monkeypatch):
        right = mx.fast.scaled_dot_product_attention
        monkeypatch.setattr(
            mx.fast, "scaled_dot_product_attention", lambda *a, **o: right(*a, **o) * 1.2
        )
        found = run_check(Findings("products"), products.check_products, True)
        assert found.num_wrong == len(found.failures) == len(products.TOLERANCES)
        assert "MLX's attention in mlx.core.float16 is wrong: 0.2" in found.text()

    def test_a_wrong_transform_of_mlx_is_a_wrong_number(self, monkeypatch):
        right = ops.hadamard
        monkeypatch.setattr(ops, "hadamard", lambda x: right(x) * 1.2)
        found = run_check(Findings("products"), products.check_products, True)
        assert found.num_wrong == len(products.TOLERANCES)
        assert "MLX's Hadamard transform in mlx.core.bfloat16 is wrong: 0.2" in found.text()

    @pytest.mark.parametrize(
        ("architecture", "uses"),
        [("applegpu_g17s", True), ("applegpu_g16s", False), ("applegpu_g13d", False), ("", False)],
    )
    def test_an_m5_is_checked_without_its_matrix_units_too(self, architecture, uses, monkeypatch):
        ran = []

        def found_apart(found, quick, **environment):
            ran.append((found.name, environment))
            found.failures.append("planted")
            return found

        monkeypatch.delenv(products.VARIABLE, raising=False)
        monkeypatch.setattr(products, "found_apart", found_apart)
        monkeypatch.setattr(products, "errors_of", lambda dtype, *sizes: {"product": 0.0})
        monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
        monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
        monkeypatch.setattr(products, "has_matrix_units", has_matrix_units.__wrapped__)
        found = run_check(Findings("products"), products.check_products, True)
        assert ran == [("products", {products.VARIABLE: "applegpu_g16s"})] * uses
        assert found.ok and found.text().endswith("without matrix units: FAILED") == uses


class TestMemory:
    def test_an_engine_that_takes_more_than_it_promises_fails(self, monkeypatch):
        promised = Engine.memory_budget.fget
        monkeypatch.setattr(
            Engine,
            "memory_budget",
            property(
                lambda engine: replace(promised(engine), pool=0, weights=0, step=1, gathered=0)
            ),
        )
        found = run_check(Findings("memory"), memory.check_memory, True)
        assert "MB: expected at most 0.0 MB" in found.failures[0]


class TestProcesses:
    @pytest.fixture
    def on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))

    def test_on_a_gpu_a_check_that_ends_its_process_fails_alone(
        self, on_a_gpu, monkeypatch, tmp_path, capsys
    ):
        def run(command, **options):
            name = command[command.index("--only") + 1]
            found = {"ok": True, "name": name, "lines": ["was here"]}
            with open(command[command.index("--json") + 1], "w") as file:
                json.dump({"checks": {} if name == "order" else {name: found}}, file)
            status = -6 if name == "order" else 0
            return subprocess.CompletedProcess(command, status, "", "abort\n")

        monkeypatch.setattr(subprocess, "run", run)
        ran = []
        monkeypatch.setattr(
            doctor, "CHECKS", {name: lambda *a: ran.append(a) for name in doctor.CHECKS}
        )
        path = tmp_path / "report.json"
        assert main(["--json", str(path)]) == 1
        out = capsys.readouterr().out
        assert out.startswith("mlx_paged.doctor: FAILED: order (")
        assert "order: ended with status -6: abort" in out and out.count("was here") == 7
        assert [found.name for found, _ in ran] == ["kernels", "sources"]
        report = json.loads(path.read_text())
        assert not report["ok"] and report["checks"]["tokens"]["ok"]

    def test_the_report_has_what_was_found_before_the_end(self, monkeypatch, tmp_path):
        path = tmp_path / "report.json"

        def interrupted(found, quick):
            assert json.loads(path.read_text())["checks"].keys() == {"first"}
            raise KeyboardInterrupt

        def first(found, quick):
            assert json.loads(path.read_text()) == {
                "ok": False,
                "num_wrong": 0,
                "quick": False,
                "checks": {},
            }

        monkeypatch.setattr(doctor, "CHECKS", {"first": first, "second": interrupted})
        assert main(["--json", str(path)]) == 130
        assert json.loads(path.read_text())["checks"]["first"]["ok"]

    def test_after_ctrl_c_the_page_has_what_a_process_found(
        self, on_a_gpu, monkeypatch, tmp_path, capsys
    ):
        """Both processes get the signal; the one apart is a thread's work here."""

        def run(command, **options):
            kind = command[command.index("--only") + 1]
            found = Findings("kernels", ["was here"], numbers={"run": 3}, counted="3 of 9 variants")
            path = Path(command[command.index("--json") + 1])
            path.write_text(json.dumps({"checks": {"kernels": asdict(found)}}))
            if kind == "chunk":
                raise KeyboardInterrupt
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        path = tmp_path / "report.json"
        assert main(["--json", str(path)]) == 130
        out, err = capsys.readouterr()
        assert err.endswith("\ninterrupted\n")
        _, _, _, *left = doctor.CHECKS
        late = f"not finished: kernels; not begun: {', '.join(left)}"
        assert out.startswith(f"mlx_paged.doctor: {late} (")
        assert "\n  decode: ok, 3 of " in out and "\n  chunk: not finished, 3 of " in out
        assert "not finished: chunk: 3 of 9 variants until Ctrl-C" in out
        report = json.loads(path.read_text())["checks"]
        assert list(report) == ["machine", "common", "kernels"] and report["kernels"]["unfinished"]

    @pytest.mark.parametrize("is_wrong", [False, True])
    def test_what_a_process_found_before_it_hung_counts(self, is_wrong, monkeypatch):
        """The process is a thread here, and its end from outside an exception."""

        def hangs(found, quick):
            for number in found.progress(range(5), "round"):
                if number == 3:
                    found.num_wrong = 1
                    found.failures += ["planted: wrong"] * is_wrong
                    saved.wait(TIMEOUT)
                    raise KeyboardInterrupt

        def run(command, **options):
            main(command[3:])
            raise subprocess.TimeoutExpired(command, 300)

        def write(path, results, quick):
            right(path, results, quick)
            if results:
                saved.set()

        saved, right = threading.Event(), doctor._write
        monkeypatch.setattr(doctor, "_write", write)
        monkeypatch.setattr(doctor, "CHECKS", {"order": hangs})
        monkeypatch.setattr(findings, "SAVED_EVERY_S", 0.01)
        monkeypatch.setattr(subprocess, "run", run)
        found = apart.found_apart(Findings("order"), False)
        assert found.num_wrong == 1 and found.unfinished == "3 of 5 rounds in 1200 s"
        assert found.failures == ["planted: wrong"] * is_wrong
        state = "FAILED" if is_wrong else "not finished"
        assert findings.page([found], False).startswith(f"mlx_paged.doctor: {state}: order (")
        assert f"order: {state} (" in found.text()
        assert findings.status([found]) == (1 if is_wrong else 3)

    def test_a_late_check_hides_no_failure_and_is_not_ok(
        self, on_a_gpu, monkeypatch, tmp_path, capsys
    ):
        def fill(found, quick):
            found.failures, found.unfinished = (
                known[found.name].failures,
                known[found.name].unfinished,
            )

        late = Findings("order", unfinished="7 of 9 rounds in 1200 s")
        monkeypatch.setattr(doctor, "CHECKS", {"order": None, "tokens": None})
        for failures, status, verdict in (
            ([], 3, "not finished: order ("),
            (["planted"], 1, "FAILED: tokens; not finished: order ("),
        ):
            known = {"order": late, "tokens": Findings("tokens", failures=failures)}
            monkeypatch.setattr(doctor, "found_apart", fill)
            assert main(["--json", str(tmp_path / "report.json")]) == status
            out = capsys.readouterr().out
            assert out.startswith(f"mlx_paged.doctor: {verdict}")
            assert "\norder: not finished (" in out
            report = json.loads((tmp_path / "report.json").read_text())
            assert not report["ok"] and not report["checks"]["order"]["ok"]

    def test_a_report_that_was_cut_off_is_none(self, monkeypatch):
        def run(command, **options):
            Path(command[command.index("--json") + 1]).write_text('{"checks": {"ord')
            raise subprocess.TimeoutExpired(command, 300)

        monkeypatch.setattr(subprocess, "run", run)
        found = apart.found_apart(Findings("order"), True)
        assert not found.failures and found.unfinished == "nothing counted in 300 s"

    def test_findings_may_change_while_they_are_saved(self, monkeypatch):
        saved = threading.Event()

        def save():
            saved.set()
            raise RuntimeError("dictionary changed size during iteration")

        monkeypatch.setattr(findings, "SAVED_EVERY_S", 0.01)
        unheard = []
        monkeypatch.setattr(threading, "excepthook", unheard.append)
        found = run_check(Findings("order"), lambda found, quick: saved.wait(TIMEOUT), True, save)
        assert saved.is_set() and found.ok and not unheard

    @pytest.mark.heavy
    def test_a_process_gets_its_variables_and_its_answer_is_read(self):
        found = apart.found_apart(Findings("machine"), True, MLX_PAGED_ATTENTION="gather")
        assert "gathered blocks, MLX's attention" in found.numbers["attention"]


class TestBuffers:
    def test_a_step_is_timed_in_a_process_of_each_length(self, monkeypatch):
        seen = []

        def apart(found, quick, **environment):
            seen.append((found.name, environment))
            found.numbers["step_ms"] = 2.0 if environment[OPERATIONS] == "40" else 1.5
            return found

        monkeypatch.setattr(buffers, "found_apart", apart)
        found = Findings("speed")
        buffers.compare_buffers(found, True)
        assert seen == [("step", {OPERATIONS: each}) for each in ("40", "1000")]
        assert found.numbers["step_ms_by_operations"] == {"40": 2.0, "1000": 1.5}
        assert found.lines[-1] == f"{OPERATIONS}=1000 is the faster one here"

    def test_a_process_that_fails_is_told(self, monkeypatch):
        failed = Findings("step", failures=["step: no answer"])
        monkeypatch.setattr(buffers, "found_apart", lambda *_, **__: failed)
        found = Findings("speed")
        buffers.compare_buffers(found, True)
        assert found.failures == ["step: no answer"] * 2 and not found.numbers

    def test_the_command_takes_every_name_that_has_a_process_of_its_own(self):
        for name in (*doctor.APART, *flags.KINDS, flags.STEP):
            assert flags.parse(["--only", name])[1].only == name
            assert doctor._chosen(name)

    @pytest.mark.slow
    def test_the_step_has_a_time(self):
        found = apart.found_apart(Findings("step"), True, **{OPERATIONS: "40"})
        assert found.ok and found.numbers["step_ms"] > 0
