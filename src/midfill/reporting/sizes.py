"""Numbers of bytes, written for people."""


def format_size(count: int) -> str:
    """A number of bytes with three digits and a unit."""
    size = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.3g} {unit}"
