"""Numbers of bytes in readable units."""


def format_size(count: int) -> str:
    """Return a number of bytes with three significant digits and a unit."""
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
