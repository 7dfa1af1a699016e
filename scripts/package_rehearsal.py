"""Try the packages as users of an index would get them, before they are published.

    python -m scripts.package_rehearsal [--python PATH ...]

It builds the sdist, and from the sdist a wheel for each Python, puts them on an index of this
machine (http.server on loopback), and installs ``mlx_paged[server]`` from there in an empty
environment for each Python. The dependencies come from pip's own index. There it generates, runs
the doctor, and sends a server a request. twine checks that an index can show the README.

`--python` names an interpreter and may be repeated; by default those of 3.11 to 3.14 that are on
PATH or that uv finds. Each compiles the package once: about two minutes on two idle cores.
"""

import argparse
import http.client
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NAME = "mlx-paged"
SERVER_S = 300  # for a server to start


def user_environment() -> dict[str, str]:
    """The variables of this process without those that change what a Python imports."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


class FailedError(Exception):
    """A step that failed; the message is what it printed."""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints. Raises FailedError if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=user_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise FailedError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def step(text: str, work: Callable[[], str]) -> None:
    """Run a step and print a line of it."""
    begun = time.monotonic()
    said = work()
    print(f"{text} ({time.monotonic() - begun:.0f} s): {said}", flush=True)


def last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "")


def first_line(output: str) -> str:
    return next((line for line in output.splitlines() if line.strip()), "")


def interpreters() -> list[str]:
    """The Pythons of this machine, one of each version."""
    found = []
    for version in VERSIONS:
        python = next((each for each in candidates(version) if version_of(each) == version), None)
        if python is None:
            print(f"Python {version}: none was found, left out")
        else:
            found.append(python)
    return found


def candidates(version: str) -> Iterator[str]:
    """Paths that may be a Python of a version: on PATH, and what uv finds."""
    yield shutil.which(f"python{version}") or ""
    if (uv := shutil.which("uv")) is not None:
        done = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        yield done.stdout.strip()


def version_of(python: str) -> str | None:
    """Such as 3.11; None if it is no Python that runs."""
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def environment(python: str, folder: Path) -> Path:
    """The bin folder of a new environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin"


def serve(folder: Path) -> http.server.ThreadingHTTPServer:
    """A server of the files of a folder; its lists of files are the pages of an index."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def is_of_wheel(python: Path, wheel: Path) -> str:
    """Says that the installed compiled module is that of the wheel. Raises FailedError if not."""
    code = "import mlx_paged._ext as e; print(e.__file__)"
    installed = Path(last_line(run(python, "-c", code, cwd=python.parent))).read_bytes()
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [each for each in packed.namelist() if re.search(r"/_ext\..*\.so$", each)]
        if packed.read(name) != installed:
            raise FailedError(f"another {NAME} than {wheel.name} was installed")
    return wheel.name


def serve_one(python: Path, folder: Path) -> str:
    """The text that a server of the demo model completes, started and stopped."""
    command = [str(python), "-m", "mlx_paged.server", "--port", "0"]
    log = folder / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(
            command, cwd=folder, env=user_environment(), stdout=written, stderr=written
        )
    try:
        deadline, found = time.monotonic() + SERVER_S, None
        while found is None:
            time.sleep(0.1)
            if server.poll() is not None or time.monotonic() > deadline:
                raise FailedError(f"the server did not start\n{log.read_text()}")
            found = re.search(r"serving .* on (http://\S+)", log.read_text())
        connection = http.client.HTTPConnection(urlsplit(found[1]).netloc, timeout=SERVER_S)
        body = json.dumps({"prompt": "def f", "max_tokens": 8, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        if answer.status != 200:
            raise FailedError(f"status {answer.status}: {content}")
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(SERVER_S)
    if status:
        raise FailedError(f"the server ended with status {status}\n{log.read_text()}")
    return repr(json.loads(content)["choices"][0]["text"])


def rehearse(python: str, sdist: Path, index: Path, work: Path) -> None:
    """Build for one Python, install from the index, and use what was installed."""
    version = version_of(python)
    label, own = f"Python {version}", work / f"python{version}"
    own.mkdir()
    wheels = own / "wheels"

    def build() -> str:
        builder = environment(python, own / "builder")
        run(builder / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, sdist)
        (wheel,) = wheels.glob("*.whl")
        shutil.copy(wheel, index / NAME)
        return wheel.name

    step(f"{label}, wheel from the sdist", build)
    (wheel,) = wheels.glob("*.whl")
    user, empty = environment(python, own / "user"), own / "empty"
    empty.mkdir()
    pages = serve(index)

    def install() -> str:
        url = f"http://127.0.0.1:{pages.server_port}/"
        release = wheel.name.split("-")[1]
        asked = ("--extra-index-url", url, f"mlx_paged[server]=={release}")
        run(user / "pip", "install", "--quiet", *asked, cwd=empty)
        return is_of_wheel(user / "python", wheel)

    step(f"{label}, pip install 'mlx_paged[server]'", install)
    pages.shutdown()
    pages.server_close()
    generate = ("-m", "mlx_paged.generate", "-p", "def f", "--max-tokens", "8")
    step(
        f"{label}, generate",
        lambda: " / ".join(run(user / "python", *generate, cwd=empty).split("\n")),
    )
    doctor: tuple[str | Path, ...] = (user / "mlx_paged", "doctor", "--quick")
    step(f"{label}, doctor --quick", lambda: first_line(run(*doctor, cwd=empty)))
    step(f"{label}, server", lambda: serve_one(user / "python", empty))


def main(argv: list[str] | None = None) -> int:
    """Returns 1 after a step that failed, 2 without any Python."""
    parser = argparse.ArgumentParser(prog="python -m scripts.package_rehearsal")
    parser.add_argument("--python", action="append", metavar="PATH", help="may be repeated")
    args = parser.parse_args(argv)
    pythons = args.python or interpreters()
    wrong = [path for path in pythons if version_of(path) not in VERSIONS]
    if wrong or not pythons:
        parser.error(f"--python is {wrong}: expected interpreters of {', '.join(VERSIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        index = work / "index"
        (index / NAME).mkdir(parents=True)
        try:
            tools = environment(pythons[0], work / "tools")
            run(tools / "pip", "install", "--quiet", "build", "twine")
            build = (tools / "python", "-m", "build", "--sdist", "--outdir", index / NAME, ROOT)
            step("sdist", lambda: last_line(run(*build)))
            (sdist,) = (index / NAME).glob("*.tar.gz")
            for python in pythons:
                rehearse(python, sdist, index, work)
            packages = sorted((index / NAME).iterdir())
            twine: tuple[str | Path, ...] = (tools / "twine", "check", "--strict", *packages)
            step("twine check --strict", lambda: f"{run(*twine).count('PASSED')} passed")
        except FailedError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    print(f"{len(pythons)} Pythons: all steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
