"""The protocol as pygls speaks it, with two differences: what is read, and how faults end.

Requests about documents are decoded into this server's own structs (``messages``). A message that
can't be decoded is answered with an error if it is a request, so that its client never waits, and
is one line in the log otherwise.
"""

import contextlib
import logging
from typing import Any

import msgspec
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.protocol import JsonRPCNotification, JsonRPCRequestMessage, LanguageServerProtocol

from midfill.lsp.messages import DID_CHANGE, DID_CLOSE, PARAMETERS, DidClose

_log = logging.getLogger(__name__)


class MidfillProtocol(LanguageServerProtocol):
    """Decodes messages and hands them to the features that are registered for them."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Return a JSON object as it is; ``handle_message`` decodes the whole message."""
        return data

    def handle_message(self, message: Any) -> None:
        """Decode a message and start what it asks for."""
        if not isinstance(message, dict):
            _log.warning("ignored: a message that is no object")
            return
        try:
            decoded = self._decode(message)
        except (msgspec.ValidationError, JsonRpcException) as error:
            self._report_fault(message, error)
            return
        super().handle_message(decoded)

    def _decode(self, message: dict[str, Any]) -> Any:
        method = message.get("method")
        if not isinstance(method, str) or method not in PARAMETERS:
            return super().structure_message({"jsonrpc": "2.0", **message})
        params = msgspec.convert(message.get("params"), PARAMETERS[method])
        if "id" in message:
            return JsonRPCRequestMessage(message["id"], method, "2.0", params)
        return JsonRPCNotification(method, "2.0", params)

    def _report_fault(self, message: dict[str, Any], error: Exception) -> None:
        """Answer a request that can't be decoded; log a notification that can't."""
        method = message.get("method") or "a message"
        fault = f"{method} can't be read: {error}"
        _log.warning("%s", fault)
        if "id" in message and "method" in message:
            self._send_response(
                message["id"], error=JsonRpcInvalidParams(fault).to_response_error()
            )
        elif method == DID_CHANGE:
            # What the document holds now is unknown. No completions are better than those of
            # another text.
            with contextlib.suppress(msgspec.ValidationError):
                close = msgspec.convert(message.get("params"), DidClose)
                super().handle_message(JsonRPCNotification(DID_CLOSE, "2.0", close))
