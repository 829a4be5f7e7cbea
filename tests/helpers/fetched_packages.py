"""Packages as if they had been fetched."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.package_sources import Package, PackageRecord
from midfill_lab.training.corpus import PACKAGE_RECORD


def put_package(folder: Path, package: Package, texts: Mapping[str, str]) -> None:
    """Lay out a package's files in its folder below ``folder``, under MIT's licence."""
    place = folder / package.folder_name
    for name, text in {"LICENSE": "MIT License\n", **texts}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    record = PackageRecord(
        requirement=str(package),
        archive="an.archive",
        sha256=package.sha256 or "0",
        suffixes=package.suffixes,
        files=len(texts),
    )
    (place / PACKAGE_RECORD).write_bytes(msgspec.json.encode(record))
