"""The folder for everything midfill keeps: models it fetched and data it derived from them."""

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """The user's cache folder for midfill; the environment variable MIDFILL_CACHE overrides it."""
    override = os.environ.get("MIDFILL_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("midfill"))
