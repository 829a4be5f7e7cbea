"""require_ray: Ray, or one line that says how to get it."""

import sys
from importlib.metadata import PackageNotFoundError, version

from midfill.errors import MidfillError
from midfill.system.extras import require


def require_ray() -> None:
    """Check that Ray is installed.

    Raises:
        MidfillError: it is not, or there is no Ray for this system.
    """
    if sys.platform == "win32":
        raise MidfillError("midfill cluster needs Linux or macOS; on Windows, use WSL")
    # gRPC comes with Serve. Looking for ray.serve itself would import Ray, too early.
    require("midfill cluster", ["ray", "grpc"], extra="cluster")


def installed_ray() -> str:
    """Return the version of Ray that is installed; that which midfill is tested with if none is."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "2.60.0"
