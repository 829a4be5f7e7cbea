"""Packages whose files no adapter of midfill was trained on, and that evaluations therefore use.

Versions are pinned, so that everybody cuts holes into the same texts.
"""

from pathlib import Path

from midfill.system.packages import Package, fetch_packages
from midfill.system.progress import Progress

PYTHON = (
    Package(
        "bottle",
        "0.13.4",
        "045684fbd2764eac9cdeb824861d1551d113e8b683d8d26e296898d3dd99a12e",
    ),
    Package(
        "click",
        "8.5.1",
        "8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37",
    ),
    Package(
        "httpx",
        "0.28.1",
        "d909fcccc110f8c7faf814ca82a9a4d816bc5a6dbfea25d6591d6985b8ba59ad",
    ),
    Package(
        "itsdangerous",
        "2.2.0",
        "c6242fc49e35958c8b15141343aa660db5fc54d4f13a1db01a3f5891b98700ef",
    ),
    Package(
        "more-itertools",
        "11.2.1",
        "35a7377edd1dd6608dcb2cdf534ded55ea32d49448875ad042cd3f879fb1ded0",
    ),
    Package(
        "pluggy",
        "1.7.0",
        "7dd7b0d8832ba3cb632c306926ded123429211b83641b35dc5c41ad2d34f9bec",
    ),
    Package(
        "requests",
        "2.34.2",
        "2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0",
    ),
    Package(
        "rich",
        "15.0.0",
        "33bd4ef74232fb73fe9279a257718407f169c09b78a87ad3d296f548e27de0bb",
    ),
    Package(
        "tabulate",
        "0.10.0",
        "f0b0622e567335c8fabaaa659f1b33bcb6ddfe2e496071b743aa113f8774f2d3",
    ),
    Package(
        "werkzeug",
        "3.1.9",
        "6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab",
    ),
)
JAVASCRIPT = (
    Package("coverage", "7.6.10"),
    Package(
        "django",
        "5.1.4",
        "236e023f021f5ce7dee5779de7b286565fdea5f4ab86bae5338e3f7b69896cf0",
    ),
    Package(
        "django-debug-toolbar",
        "4.4.6",
        "3beb671c9ec44ffb817fad2780667f172bd1c067dbcabad6268ce39a81335f45",
    ),
    Package(
        "flower",
        "2.0.1",
        "9db2c621eeefbc844c8dd88be64aef61e84e2deb29b271e02ab2b5b9f01068e2",
    ),
    Package(
        "jupyter-contrib-nbextensions",
        "0.5.1",
        "2c071f0aa208c569666f656bdc0f66906ca493cf9f06f46db6350db11030ff40",
    ),
    Package(
        "snakeviz",
        "2.2.2",
        "77e7b9c82f6152edc330040319b97612351cd9b48c706434c535c2df31d10ac5",
    ),
)
"""Python packages with JavaScript sources that are not minified."""


def fetch_held_out(folder: Path, progress: Progress) -> tuple[Path, Path]:
    """Fetch the files of all packages into ``folder``/python and ``folder``/javascript.

    Packages that are there are kept.

    Returns:
        The folders python and javascript.

    Raises:
        MidfillError: a package can't be fetched.
    """
    python, javascript = folder / "python", folder / "javascript"
    fetch_packages(PYTHON, python, (".py",), progress)
    fetch_packages(JAVASCRIPT, javascript, (".js",), progress)
    return python, javascript
