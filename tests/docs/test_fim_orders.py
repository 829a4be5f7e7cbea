"""docs/models.md lists every family of sentinels, with its order."""

import re
from pathlib import Path

from midfill.infill.formats import FAMILIES

ROOT = Path(__file__).parents[2]
ORDERS = {"psm": "prefix first", "spm": "suffix first"}


def test_the_table_has_each_family_and_its_order() -> None:
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| [^|]+ \| ((?:prefix|suffix) first)", text, re.MULTILINE)
    assert sorted(rows) == sorted((each.name, ORDERS[each.order]) for each in FAMILIES)
