"""What the server asks of whatever generates: an engine process, or other servers."""

from collections.abc import Mapping
from typing import Protocol

from midfill.engine.messages import EngineInfo
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest, EngineStats, TenantStats
from midfill.errors import InvalidRequestError


class ServedEngine(Protocol):
    """See ``engine.process.client.EngineClient``, the engine of ``midfill serve``, for each."""

    @property
    def state(self) -> str:
        """ "ready" while requests are accepted."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """What it reported when it was last ready; None before."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Its gauges and counters."""
        ...

    @property
    def tenants(self) -> Mapping[str, TenantStats]:
        """The same by tenant."""
        ...

    @property
    def restarts(self) -> int:
        """How often it was restarted."""
        ...

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests that have produced no output yet."""
        ...

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request may succeed."""
        ...

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        """Refuse a request of which only its tenant, deadline and document are known.

        Raises:
            QueueFullError: ``submit`` would refuse it, whatever its prompt.
        """
        ...

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Queue requests, all or none; the stream yields their outputs.

        Raises:
            UnavailableError: they can't be served now.
        """
        ...


def refuse_methods(specification: str) -> None:
    """Refuse a method where there are none at all.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError("methods are the engine's; there are none here", param="method")
