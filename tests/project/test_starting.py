"""Commands answer at once, before slow imports, and Ctrl-C at their start leaves no traceback."""

import os
import signal
import subprocess
import sys

import pytest

import mlx_paged
from mlx_paged.__main__ import BENCHES
from mlx_paged.cli import Parser
from tests.support import TIMEOUT
from tests.support.documents import ROOT

SLOW = {"mlx", "mlx_lm", "numpy", "transformers"}
COMMANDS = ("generate", "server", "run", "doctor", "kv_disk", "heads", "terminal")
HELP = [
    *(["-m", "mlx_paged", *arguments] for arguments in ([], ["--version"], ["bench", "--help"])),
    *(["-m", f"mlx_paged.{name}", "--help"] for name in COMMANDS),
    *(["-m", "mlx_paged", "bench", name, "--help"] for name in BENCHES),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT
    )


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
def test_help_imports_nothing_slow(arguments):
    shown = run("-X", "importtime", *arguments)
    assert shown.returncode == 0 and len(shown.stdout.split()) > 1
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in shown.stderr.splitlines()}
    assert "mlx_paged" in imported
    assert imported & SLOW == set()


@pytest.mark.parametrize("name", BENCHES)
def test_a_mistake_of_a_bench_comes_before_slow_imports(name):
    found = run("-X", "importtime", "-m", "mlx_paged", "bench", name, "--no-such-flag")
    assert found.returncode == 2 and found.stderr.endswith("arguments: --no-such-flag\n")
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in found.stderr.splitlines()}
    assert "mlx_paged" in imported and imported & SLOW == set()


MISTAKES = {
    "generate": [
        ("", "no prompt: give --prompt or --prompts-file"),
        ("-p x --resume", "--resume is given: expected --output beside it"),
        ("-p x --model no-model", "model no-model: no such directory"),
        ("-p x --model qwen3", "no such directory; models of the hub have names such as mlx-com"),
        ("-p x --model mlx_paged", "it has no config.json: expected a folder with config.json and"),
        ("-p x --model mlx_paged", " *.safetensors, such as demo_model in it"),
        ("-p x --model docs", "model docs: it has no config.json: expected a folder with config"),
        ("-p x --model README.md", "model README.md: it is a file: expected a folder with config"),
        ("-p x --draft-model docs", "--draft-model: model docs: it has no config.json"),
        ("-p x --speculate ngram --draft-model x/y", "--speculate is given beside --draft-model"),
        ("-p x --draft-model a/b --draft-head x", "--draft-model is given beside --draft-head"),
        ("-p x --num-draft-tokens 5", "--num-draft-tokens is given: expected --draft-model"),
        ("-p x --draft-head auto", "--draft-head is auto: expected --model, whose folder has the"),
        ("-p x --kv-disk README.md", "--kv-disk README.md: it is a file: expected a directory"),
        ("-p x --kv-disk-gb 3", "--kv-disk-gb is given: expected --kv-disk beside it"),
        ("-p x --adapter-path nowhere", "adapter nowhere: no such directory"),
        ("-p x --n 3 --best-of 2", "--n is 3: expected at most --best-of 2"),
        (
            "-p x --stats-json /nowhere/x",
            "--stats-json /nowhere/x: No such file or directory: expec",
        ),
        ("-p x --output /nowhere/x", "--output /nowhere/x: No such file or directory: expected a"),
        ("-p x --seed 99999999999999999999", "expected a whole number from 0 to 922337203685477"),
        ("-p x --model /nowhere/x", "model /nowhere/x: no such directory: expected a folder with"),
        ("--prompts-file nowhere", "--prompts-file nowhere: No such file or directory: expected a"),
        ("--prompts-file README.md", "README.md line 1: not valid JSON at column 1"),
    ],
    "terminal": [
        ("", "--model is not given: expected a chat model"),
        ("--model docs", "model docs: it has no config.json"),
        ("--model x/y --kv-disk-gb 3", "--kv-disk-gb is given: expected --kv-disk beside it"),
        ("--image cat.png", "--image/--vision: refused: a chat here has no images"),
        ("--prompt hi", "--prompt/-p: refused: type the message in the chat"),
    ],
    "server": [
        ("--model docs", "model docs: it has no config.json"),
        ("--drain-seconds -1", "--drain-seconds: expected a number of seconds >= 0, got '-1'"),
        ("--models-dir nowhere", "--models-dir is nowhere: expected a directory"),
        ("--draft-model docs", "--draft-model: model docs: it has no config.json"),
        ("--uds /nowhere/x", "--uds /nowhere/x: No such file or directory: expected a path"),
        ("--chat-template-args x", "--chat-template-args: line 1 column 1: not valid JSON"),
        ("--chat-template-args []", "--chat-template-args: expected a JSON object, got '[]'"),
    ],
    "run": [
        ("", "SCRIPT or COMMAND: expected a file or Python command, got ''"),
        ("no-program.py", "expected a file or Python command, got 'no-program.py'"),
        ("-m no_module", "argument -m: expected a Python module, got 'no_module'"),
    ],
    "doctor": [
        ("--only memry", "got 'memry' (did you mean memory?)"),
        ("--json /nowhere/x", "argument --json: /nowhere/x: No such file or directory"),
        ("quick", "unrecognized arguments: quick"),
    ],
    "kv_disk": [
        ("list README.md", "unrecognized arguments: README.md; usage: python -m mlx_paged.kv_disk"),
    ],
    "heads": [
        ("extrct x y", "(did you mean extract?)"),
        ("extract nowhere y.safetensors", "nowhere: no such directory"),
    ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_that_need_no_mlx_come_before_slow_imports(name):
    """Each command in one process of its own, one mistake after another."""
    program = (
        "import contextlib, importlib, io, sys\n"
        "module = importlib.import_module(sys.argv[1])\n"
        "for line in sys.stdin.read().split('\\n'):\n"
        "    sys.argv[1:] = line.split()\n"
        "    shown = io.StringIO()\n"
        "    with contextlib.redirect_stderr(shown):\n"
        "        try:\n"
        "            status = module.main()\n"
        "        except SystemExit as end:\n"
        "            status = end.code\n"
        "    print(status, shown.getvalue(), end='')\n"
        "print(*{name.split('.')[0] for name in sys.modules}, end='')\n"
    )
    module = f"mlx_paged.{name}" if name == "run" else f"mlx_paged.{name}.__main__"
    found = subprocess.run(
        [sys.executable, "-c", program, module],
        input="\n".join(arguments for arguments, _ in MISTAKES[name]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=ROOT,
    )
    *lines, imported = found.stdout.split("\n")
    assert len(lines) == len(MISTAKES[name]), found
    for line, (_, message) in zip(lines, MISTAKES[name], strict=True):
        assert line.startswith("2 ") and message in line
    assert set(imported.split()) & SLOW == set()


def test_the_package_itself_imports_nothing_slow():
    code = "import sys, mlx_paged; print(*{name.split('.')[0] for name in sys.modules})"
    assert set(run("-c", code).stdout.split()) & SLOW == set()


def test_exported_names_are_there_at_their_first_use():
    code = (
        "import mlx_paged; assert set(mlx_paged.__all__) <= set(dir(mlx_paged));"
        "print(*(f'{getattr(mlx_paged, name).__module__}.{name}' for name in mlx_paged.__all__))"
    )
    found = run("-c", code)
    assert found.stderr == ""
    assert len(found.stdout.split()) == len(mlx_paged.__all__) > 20
    star = run("-c", "from mlx_paged import *; print(Engine.__name__, SamplingParams.__name__)")
    assert star.stdout == "Engine SamplingParams\n"
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = mlx_paged.Engin


def test_an_mlx_that_does_not_fit_is_one_line():
    code = (
        "import importlib.metadata as m, runpy, sys; known = m.version;"
        "m.version = lambda name: '0.31.0' if name == 'mlx' else known(name);"
        "sys.argv[1:] = {!r}; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
    )
    for name, arguments in {
        "generate": ["-p", "x"],
        "server": [],
        "doctor": [],
        "run": ["-m", "json.tool"],
    }.items():
        found = run("-c", code.format(arguments, f"mlx_paged.{name}"))
        assert found.returncode == 2, name
        assert found.stderr.count("\n") == 1 and "mlx 0.31.0 is installed" in found.stderr
    found = run("-c", code.split("sys.argv")[0] + "from mlx_paged import Engine")
    assert "UntestedVersionError: mlx 0.31.0 is installed" in found.stderr


def test_ctrl_c_within_an_exec_of_a_text_is_a_status_too(tmp_path, monkeypatch):
    """CPython ends such a module by SIGINT, even though the exception is caught."""
    (tmp_path / "interrupted.py").write_text(
        "from mlx_paged.starting import start\n"
        "start(lambda: exec('import os, signal; os.kill(os.getpid(), signal.SIGINT)'))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run("-m", "interrupted")
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize("way", ["start(lambda: print('x' * 10**6) or 0)", "main()"])
def test_a_reader_that_closes_stdout_leaves_no_traceback(way):
    """As of ``mlx_paged bench serving | head``: the command's own write fails, or the last one."""
    code = (
        "import sys\n"
        "from mlx_paged import __main__ as command\n"
        "from mlx_paged.starting import start\n"
        "main, command._run = command.main, lambda name: print('x' * 10**6)\n"
        "sys.argv = ['mlx_paged', 'bench']\n"
        "print(end='', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code + way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_runs_where_standard_files_are_closed(closed, tmp_path):
    """Else a file of the model would have the number of a standard file."""
    for arguments in ("--prompt a", "--prompt a --output answers"):
        command = f"{sys.executable} -m mlx_paged.generate --max-tokens 3 {arguments} {closed}"
        found = subprocess.run(
            ["sh", "-c", command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
            timeout=TIMEOUT,
        )
        assert found.returncode == 0 and "Traceback" not in found.stderr
    assert "aaa" in (tmp_path / "answers").read_text()


@pytest.mark.parametrize("name", ["generate", "server", "doctor"])
def test_ctrl_c_while_a_command_starts_leaves_no_traceback(name):
    """Python itself imports nothing of the package before the marker is on stderr."""
    arguments = {"generate": ["-p", "x"], "server": ["--port", "0"], "doctor": []}[name]
    command = [sys.executable, "-X", "importtime", "-m", f"mlx_paged.{name}", *arguments]
    for module in ("mlx_paged.cli", "numpy", "mlx_lm.utils"):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            while line := process.stderr.readline():
                if line.rpartition("|")[2].strip() == module:
                    break
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (0 if name == "server" else 130), (module, rest)
        assert "Traceback" not in rest


INTERRUPTING = """
import os, signal, sys


class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.environ["INTERRUPT_AT"] = ""
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("ended", ["mlx_paged.starting", "mlx_paged.{}", "mlx_paged.cli"])
@pytest.mark.parametrize("name", ["generate", "server", "doctor", "kv_disk", "terminal", "heads"])
def test_ctrl_c_within_the_imports_of_the_package_leaves_no_traceback(
    name, ended, tmp_path, monkeypatch
):
    """From the first line of the package on; Python's own start comes before it."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("INTERRUPT_AT", ended.format(name))
    found = run("-m", f"mlx_paged.{name}", "--help")
    expected = (0, "") if name == "server" else (130, "interrupted\n")
    assert (found.returncode, found.stderr, found.stdout) == (*expected, "")


@pytest.mark.parametrize("arguments", [[], ["server"], ["chat", "--help"]])
def test_ctrl_c_within_the_imports_of_mlx_paged_leaves_no_traceback(
    arguments, tmp_path, monkeypatch
):
    """As ``python -m mlx_paged``, and as pip's script of the command."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    script = tmp_path / "mlx_paged"
    script.write_text("import sys\nfrom mlx_paged.__main__ import main\nsys.exit(main())\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("INTERRUPT_AT", "mlx_paged.starting")
    expected = (0, "") if arguments == ["server"] else (130, "interrupted\n")
    for program in (["-m", "mlx_paged"], ["-mmlx_paged"], [str(script)]):
        found = run(*program, *arguments)
        assert (found.returncode, found.stderr) == expected, program


def test_other_programs_keep_their_own_ctrl_c(tmp_path):
    """A program that imports the package, and one that a shell started in the background."""
    program = tmp_path / "program.py"
    program.write_text("import signal, mlx_paged; print(signal.getsignal(signal.SIGINT).__name__)")
    assert run(str(program)).stdout == "default_int_handler\n"
    code = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "sys.argv = ['mlx_paged'];"
        "import mlx_paged.starting; assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN;"
        "mlx_paged.starting.start(lambda: signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"
    )
    found = run("-c", code)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("status", [0, 3])
def test_ctrl_c_after_a_command_has_ended_keeps_its_status(status):
    """While Python ends, KeyboardInterrupt would be shown and ignored."""
    code = (
        "import atexit, os, signal;"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT));"
        "from mlx_paged.starting import start;"
        f"start(lambda: print('done') or {status})"
    )
    found = run("-c", code)
    assert (found.returncode, found.stdout, found.stderr) == (status, "done\n", "")


def test_a_flag_that_does_not_exist_is_answered_with_a_similar_one(capsys):
    parser = Parser("program")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--policy", choices=["fcfs", "priority"])
    for flag in ("--trace", "--request-rate", "--model"):
        parser.add_argument(flag)
    for given, hint in {
        ("--max_tokens", "3"): "--max_tokens 3 (did you mean --max-tokens?)",
        ("--max-token=3", "--polcy=x"): "--polcy=x (did you mean --policy?)",
        ("--zzzz",): "--zzzz",
        ("--policy", "prio"): "(choose from 'fcfs', 'priority') (did you mean priority?)",
        ("--rate", "3"): "--rate 3 (did you mean --request-rate?)",
        ("--nope",): "arguments: --nope",
        ("word",): "arguments: word",
    }.items():
        with pytest.raises(SystemExit):
            parser.parse_args(given)
        assert capsys.readouterr().err.endswith(f"{hint}\n")
