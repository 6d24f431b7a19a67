"""Where the corpus's packages come from: the system's and Python's own installers, asked for one package at a time."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_TIMEOUT_S = 900


class Unavailable(Exception):
    """A package cannot be had here; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """The files of a package."""

    root: Path
    version: str


class Package(Protocol):
    """Something that unpack() turns into files, under the cache folder if it has to be fetched."""

    def unpack(self, cache: Path) -> Tree:
        """Its files. Raises Unavailable."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Debian:
    """A package of the Debian release that this machine runs."""

    name: str

    def unpack(self, cache: Path) -> Tree:
        """The package's file tree. Raises Unavailable where apt-get does not find it."""
        folder = cache / "debian" / self.name
        if not list(folder.glob("*.deb")):
            folder.mkdir(parents=True, exist_ok=True)
            _run(["apt-get", "download", self.name], folder)
        (archive,) = folder.glob("*.deb")
        tree = folder / "tree"
        if not tree.exists():
            _run(["dpkg-deb", "-x", str(archive), str(folder / "part")], folder)
            os.rename(folder / "part", tree)
        return Tree(root=tree, version=_run(["dpkg-deb", "-f", str(archive), "Version"], folder).strip())


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A Python package: as it is installed here, or else fetched without what it needs to run."""

    name: str
    version: str = ""
    """The one to fetch; none given: any."""
    module: str = ""
    """Package folder in it where that has another name."""

    def unpack(self, cache: Path) -> Tree:
        """The folder of its module. Raises Unavailable where pip does not find a wheel of it."""
        module = self.module or self.name
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            version = importlib.metadata.version(self.name)
            return Tree(root=Path(spec.submodule_search_locations[0]), version=version)
        folder = cache / "wheels" / self.name
        if not list(folder.glob("*.whl")):
            folder.mkdir(parents=True, exist_ok=True)
            wanted = f"{self.name}=={self.version}" if self.version else self.name
            options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
            _run([sys.executable, "-m", "pip", "download", *options, wanted], folder)
        (archive,) = folder.glob("*.whl")
        tree = folder / "tree"
        if not tree.exists():
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder / "part")
            os.rename(folder / "part", tree)
        return Tree(root=tree / module, version=archive.name.split("-")[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StandardLibrary:
    """That of the Python which runs this."""

    def unpack(self, cache: Path) -> Tree:
        """Its folder; installed packages lie below it."""
        return Tree(root=Path(sysconfig.get_paths()["stdlib"]), version=platform.python_version())


def _run(command: Sequence[str], folder: Path) -> str:
    """What a command prints. Raises Unavailable with its last complaint if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip()).split("\n")[-1]
        raise Unavailable(f"{' '.join(command[:2])} ended with status {done.returncode}: {complaint}")
    return done.stdout
