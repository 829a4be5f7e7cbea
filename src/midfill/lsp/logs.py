"""Logs: one line per event on standard error. Standard output is the protocol's."""

import logging
import sys

_LIBRARIES = ("pygls", "httpx", "httpcore", "asyncio")


def log_to_stderr(level: str) -> None:
    """Log what midfill has to say from a level on, and the errors of libraries."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="midfill lsp: %(levelname)s %(message)s"
    )
    if level == "debug":
        return
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("pygls.protocol.json_rpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether pygls logs something other than the traceback of a fault that is one line already."""
    return not record.getMessage().startswith("Unable to deserialize message")
