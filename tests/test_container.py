"""The image of ``Containerfile``, really built, and a server that runs in it.

Needs root, buildah and, in place of the image that the file begins with, a Debian made by
mmdebstrap with this interpreter in it; ``.ci/run`` installs both programs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from midfill.system.cache import cache_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root builds images in a plain chroot"),
    *(
        pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")
        for name in ("buildah", "mmdebstrap")
    ),
]

ROOT = Path(__file__).parents[1]
BASE = "localhost/python:3.12-slim"
LIBRARIES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libreadline8,libsqlite3-0,libssl3,zlib1g"
CERTIFICATES = "/etc/ssl/certs"
USER = 1000
KEY = "secret"


def run(*command: str | Path, **options: Any) -> str:
    """Run a program; return what it wrote to standard output."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@dataclass(frozen=True)
class Buildah:
    """buildah with a storage of its own."""

    storage: Path

    def command(self, *arguments: str | Path) -> list[str | Path]:
        folders = ["--root", self.storage / "root", "--runroot", self.storage / "run"]
        return ["buildah", *folders, *arguments]

    def __call__(self, *arguments: str | Path) -> str:
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        return run(*self.command(*arguments), env=environment).strip()


@dataclass(frozen=True)
class Image:
    """A container of the built image, in which programs are run."""

    buildah: Buildah
    container: str
    config: dict[str, Any]

    def command(
        self, arguments: Sequence[str], *, key: str | None, volumes: Sequence[str]
    ) -> list[str | Path]:
        """Return what starts the image as ``podman run`` does, in this machine's network."""
        options = ["run", "--isolation", "chroot"]
        options += [word for volume in volumes for word in ("--volume", volume)]
        options += [] if key is None else ["--env", f"MIDFILL_API_KEY={key}"]
        entry = self.config["Entrypoint"]
        return self.buildah.command(*options, self.container, "--", *entry, *arguments)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    buildah = Buildah(tmp_path_factory.mktemp("storage"))
    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


@pytest.fixture(scope="module")
def base(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image like Docker's official ones of Python: Debian, and Python in /usr/local."""
    python = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if python == Path("/usr"):
        pytest.skip("this Python can't be copied: it is spread over the system's folders")
    archive = tmp_path_factory.mktemp("debian") / "debian.tar"
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    options = ["--variant=minbase", f"--include={LIBRARIES}"]
    run("mmdebstrap", *options, release["VERSION_CODENAME"], archive)
    container = buildah("from", "scratch")
    folder = Path(buildah("mount", container))
    run("tar", "--extract", "--file", archive, "--directory", folder)
    local = folder / "usr" / "local"
    kept = shutil.ignore_patterns("__pycache__", "site-packages", "test", "*.a")
    shutil.copytree(python / "lib" / version, local / "lib" / version, ignore=kept, symlinks=True)
    for library in (python / "lib").glob("libpython*.so*"):
        shutil.copy2(library, local / "lib", follow_symlinks=False)
    shutil.copy2(python / "bin" / version, local / "bin")
    for name in ("python", "python3"):
        (local / "bin" / name).symlink_to(version)
    run("chroot", folder, "ldconfig")
    run("chroot", folder, f"/usr/local/bin/{version}", "-m", "ensurepip")
    (local / "bin" / "pip").symlink_to("pip3")
    # Packages that are fetched take no room in the image, as in the official ones.
    (folder / "etc" / "apt" / "apt.conf.d" / "clean").write_text(
        'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache ""; APT::Keep-Downloaded-Packages "0";\n'
    )
    # pip trusts whom this machine trusts: some networks have certificates of their own.
    (folder / "etc" / "pip.conf").write_text(
        f"[global]\ncert = {CERTIFICATES}/ca-certificates.crt\n"
    )
    buildah("umount", container)
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    buildah("commit", "--rm", container, BASE)
    return BASE


@pytest.fixture(scope="module")
def image(buildah: Buildah, base: str) -> Image:
    options = [
        "--isolation",
        "chroot",
        "--pull-never",
        "--volume",
        f"{CERTIFICATES}:{CERTIFICATES}:ro",
    ]
    buildah("build", *options, "--tag", "midfill", ROOT)
    container = buildah("from", "--pull-never", "midfill")
    inspected = json.loads(buildah("inspect", "--type", "image", "midfill"))
    return Image(buildah, container, inspected["OCIv1"]["config"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume for the cache, with the kernels that this environment has compiled."""
    folder = tmp_path_factory.mktemp("cache")
    if (cache_folder() / "kernels").exists():
        shutil.copytree(cache_folder() / "kernels", folder / "kernels")
    run("chown", "--recursive", str(USER), folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume with a model that the image's user may read."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
    run("chmod", "--recursive", "a+rX", folder)
    return folder


@contextmanager
def served(image: Image, model: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a model in the container; yield the URL and the process that runs there."""
    arguments = ["/model", "--host", "127.0.0.1", "--port", "0", "--kv-memory", "4MB"]
    volumes = [f"{model}:/model:ro", f"{cache}:{image_cache(image)}"]
    with subprocess.Popen(
        image.command(arguments, key=KEY, volumes=volumes),
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            banner = ""
            while "listens  on" not in banner:
                banner = process.stdout.readline()
                assert banner, f"the server ended: {process.wait()}"
            yield banner.split()[2], process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def image_cache(image: Image) -> str:
    return dict(each.split("=", 1) for each in image.config["Env"])["MIDFILL_CACHE"]


def ask(url: str, key: str) -> httpx.Response:
    body = {"prompt": "def f(", "suffix": "return x", "max_tokens": 4}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def served_process() -> int:
    """Return the id of the process that serves in the container; it is the image's user's."""
    listing = run("ps", "-A", "-ww", "-o", "pid=,uid=,args=")
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    (found,) = (
        int(process)
        for process, user, command in rows
        if int(user) == USER and "midfill serve --host 0.0.0.0 /model" in command
    )
    return found


def test_without_a_key_it_ends_with_one_line(image: Image) -> None:
    done = subprocess.run(
        image.command([], key=None, volumes=[]), capture_output=True, text=True, timeout=60
    )
    assert done.returncode
    (line,) = (line for line in done.stderr.splitlines() if "MIDFILL_API_KEY" in line)
    assert "pass --env MIDFILL_API_KEY=KEY" in line
    assert "Traceback" not in done.stderr


def test_it_holds_what_is_installed_and_nothing_it_was_made_from(
    buildah: Buildah, image: Image
) -> None:
    root = Path(buildah("mount", image.container))
    assert not list((root / "opt").iterdir())
    (package,) = root.glob("usr/local/lib/python3.*/site-packages/midfill")
    assert (package / "cli").is_dir()
    assert not list(root.glob("usr/local/lib/python3.*/site-packages/ray"))


def test_it_serves_as_a_user_of_its_own_and_ends_when_it_is_told_to(
    image: Image, cache: Path, model: Path
) -> None:
    with served(image, model, cache) as (url, process):
        answer = ask(url, KEY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"]
        assert ask(url, "wrong").status_code == 401
        os.kill(served_process(), signal.SIGTERM)
        process.wait(30)
    kept = {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()}
    assert {path.parts[0] for path in kept} >= {"kernels", "packed"}
    with served(image, model, cache) as (url, _):
        assert ask(url, KEY).status_code == 200
    assert {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()} == kept
