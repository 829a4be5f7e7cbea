"""Licences: from a package's metadata, its licence file, or the file's own header."""

from pathlib import Path

import pytest

from midfill_lab.training.licences import PERMISSIVE, LicenceFinder, spdx_of, spdx_of_all

PYTHON = """A. HISTORY OF THE SOFTWARE
==========================

Python was created in the early 1990s by Guido van Rossum. Historically, most, but not all, Python
releases have also been GPL-compatible.
"""


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("MIT", "MIT"),
        ("mit", "MIT"),
        ("MIT License", "MIT"),
        ("Permission is hereby granted, free of charge, to any person", "MIT"),
        ("Apache License, Version 2.0", "Apache-2.0"),
        ("Apache-2.0 WITH LLVM-exception", "Apache-2.0"),
        ("BSD-2-Clause", "BSD-2-Clause"),
        ("3-Clause BSD License", "BSD-3-Clause"),
        ("Redistribution and use in source and binary forms", "BSD-3-Clause"),
        ("ISC License (ISCL)", "ISC"),
        (PYTHON, "PSF-2.0"),
        ("Python Software Foundation License", "PSF-2.0"),
        ("GNU General Public License v3 or later (GPLv3+)", "GPL-3.0"),
        ("GNU Lesser General Public License v2", "LGPL-3.0"),
        ("GNU Affero General Public License v3", "AGPL-3.0"),
        ("Mozilla Public License 2.0 (MPL 2.0)", "MPL-2.0"),
        ("Other/Proprietary License", "Proprietary"),
        ("MIT for the code, GPL for the plugins", "GPL-3.0"),
        ("do what you like", None),
        ("", None),
    ],
)
def test_names_and_texts_are_recognised(text: str, licence: str | None) -> None:
    assert spdx_of(text) == licence


@pytest.mark.parametrize(
    ("expression", "licence"),
    [
        ("MIT OR GPL-2.0-only", "MIT"),
        ("GPL-2.0-only OR MIT", "MIT"),
        ("(Apache-2.0 OR MIT)", "Apache-2.0"),
        ("MIT AND GPL-2.0-only", "GPL-3.0"),
        ("GPL-2.0-only AND (MIT OR Apache-2.0)", "GPL-3.0"),
        ("(GPL-2.0-only OR MIT) AND Apache-2.0", "MIT"),
        ("MIT AND BSD-3-Clause OR GPL-3.0-only", "MIT"),
        ("GPL-3.0-only OR LGPL-3.0-only", "GPL-3.0"),
        ("MIT AND Nobody-Knows", None),
        ("MIT OR Nobody-Knows", "MIT"),
        ("BSD-3-Clause AND 0BSD AND Zlib AND CC0-1.0", "BSD-3-Clause"),
    ],
)
def test_expressions_are_evaluated(expression: str, licence: str | None) -> None:
    assert spdx_of(expression) == licence


def test_every_permissive_identifier_is_recognised() -> None:
    assert {spdx_of(name) for name in PERMISSIVE} == PERMISSIVE


def test_of_several_licences_at_once_the_least_permissive_counts() -> None:
    assert spdx_of_all(["MIT", "GPL-3.0", "Apache-2.0"]) == "GPL-3.0"
    assert spdx_of_all(["MIT", "unheard of"]) is None
    assert spdx_of_all(["MIT", "Apache-2.0"]) == "MIT"
    assert spdx_of_all([]) is None


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def licence_of(root: Path, path: Path) -> str | None:
    return LicenceFinder().licence_of(root, path, path.read_bytes())


def write_package(root: Path, name: str, metadata: str, *files: str) -> None:
    write(
        root / f"{name}-1.0.dist-info" / "METADATA", f"Metadata-Version: 2.1\n{metadata}\n\nText."
    )
    record = "".join(f"{file},sha256=x,10\n" for file in files)
    write(root / f"{name}-1.0.dist-info" / "RECORD", record)


class TestPackages:
    def test_record_tells_which_package_a_file_belongs_to(self, tmp_path: Path) -> None:
        write_package(tmp_path, "one", "License-Expression: MIT", "one/a.py", '"one/b, c.py"')
        write_package(tmp_path, "two", "License-Expression: GPL-3.0-only", "two/a.py")
        assert licence_of(tmp_path, write(tmp_path / "one/a.py", "")) == "MIT"
        assert licence_of(tmp_path, write(tmp_path / "one/b, c.py", "")) == "MIT"
        assert licence_of(tmp_path, write(tmp_path / "two/a.py", "")) == "GPL-3.0"
        assert licence_of(tmp_path, write(tmp_path / "one/of_nobody.py", "")) is None

    def test_an_expression_precedes_classifiers_and_these_free_text(self, tmp_path: Path) -> None:
        classifier = "Classifier: License :: OSI Approved :: MIT License"
        write_package(tmp_path, "a", f"License: GPL\n{classifier}", "a.py")
        write_package(tmp_path, "b", f"License-Expression: ISC\n{classifier}", "b.py")
        write_package(tmp_path, "c", "License: Apache 2.0", "c.py")
        found = [licence_of(tmp_path, write(tmp_path / f"{name}.py", "")) for name in "abc"]
        assert found == ["MIT", "ISC", "Apache-2.0"]

    def test_of_several_classifiers_the_least_permissive_counts(self, tmp_path: Path) -> None:
        write_package(
            tmp_path,
            "a",
            "Classifier: License :: OSI Approved :: MIT License\n"
            "Classifier: License :: OSI Approved :: GNU General Public License (GPL)\n"
            "Classifier: Programming Language :: Python",
            "a.py",
        )
        assert licence_of(tmp_path, write(tmp_path / "a.py", "")) == "GPL-3.0"

    def test_an_interpreters_licence_is_not_that_of_its_site_packages(self, tmp_path: Path) -> None:
        write(tmp_path / "LICENSE.txt", PYTHON)
        assert licence_of(tmp_path, write(tmp_path / "json/a.py", "")) == "PSF-2.0"
        assert licence_of(tmp_path, write(tmp_path / "site-packages/x/a.py", "")) is None


class TestFolders:
    def test_pkg_info_of_a_source_distribution(self, tmp_path: Path) -> None:
        write(tmp_path / "x-1.0/PKG-INFO", "License: BSD-3-Clause\n")
        assert licence_of(tmp_path, write(tmp_path / "x-1.0/src/x/a.py", "")) == "BSD-3-Clause"

    @pytest.mark.parametrize(
        ("named", "found"),
        [('"MIT"', "MIT"), ('"GPL-3.0 OR ISC"', "ISC"), ('"SEE FILE"', None), ("{}", None)],
    )
    def test_package_json_of_an_npm_package(
        self, tmp_path: Path, named: str, found: str | None
    ) -> None:
        write(tmp_path / "x/package.json", f'{{"name": "x", "license": {named}}}')
        assert licence_of(tmp_path, write(tmp_path / "x/lib/a.js", "")) == found

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"license"'])
    def test_a_broken_package_json_names_none(self, tmp_path: Path, text: str) -> None:
        write(tmp_path / "x/package.json", text)
        write(tmp_path / "x/LICENSE", "MIT License")
        assert licence_of(tmp_path, write(tmp_path / "x/a.js", "")) == "MIT"

    @pytest.mark.parametrize("name", ["LICENSE", "LICENCE", "COPYING", "LICENSE.md", "LICENSE.rst"])
    def test_licence_files(self, tmp_path: Path, name: str) -> None:
        write(tmp_path / "x" / name, "The MIT License (MIT)\n\nCopyright")
        assert licence_of(tmp_path, write(tmp_path / "x/deep/a.py", "")) == "MIT"

    def test_the_nearest_licence_file_counts(self, tmp_path: Path) -> None:
        write(tmp_path / "LICENSE", "MIT License")
        write(tmp_path / "vendored/COPYING", "GNU GENERAL PUBLIC LICENSE\nVersion 3")
        assert licence_of(tmp_path, write(tmp_path / "a.py", "")) == "MIT"
        assert licence_of(tmp_path, write(tmp_path / "vendored/a.py", "")) == "GPL-3.0"

    def test_the_search_does_not_leave_the_source(self, tmp_path: Path) -> None:
        write(tmp_path / "LICENSE", "MIT License")
        assert licence_of(tmp_path / "src", write(tmp_path / "src/a.py", "")) is None

    def test_the_start_of_a_licence_decides(self, tmp_path: Path) -> None:
        write(tmp_path / "LICENSE", "Apache License\nVersion 2.0\n" + " " * 3000 + "unlike the GPL")
        assert licence_of(tmp_path, write(tmp_path / "a.py", "")) == "Apache-2.0"


@pytest.mark.parametrize(
    ("header", "licence"),
    [
        ("# SPDX-License-Identifier: MIT", "MIT"),
        ("/* SPDX-License-Identifier: GPL-2.0-only */", "GPL-3.0"),
        ("# SPDX-License-Identifier: GPL-2.0-only OR MIT", "MIT"),
        ("# SPDX-License-Identifier: (GPL-2.0-only OR MIT)", "MIT"),
        ("# SPDX-License-Identifier: Nobody-Knows", None),
        ("# SPDX-License-Identifier:\nMIT", "Apache-2.0"),
    ],
)
def test_a_files_own_line_precedes_its_folders_licence(
    tmp_path: Path, header: str, licence: str | None
) -> None:
    write(tmp_path / "LICENSE", "Apache License")
    assert licence_of(tmp_path, write(tmp_path / "a.py", f"{header}\nx = 1\n")) == licence
