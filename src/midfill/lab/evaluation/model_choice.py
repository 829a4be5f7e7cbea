"""ModelChoice: which model to evaluate, and how to run it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from midfill.config import Backend, KvDtype, WeightsOption
from midfill.frontend.prompt_encoder import fingerprint_of
from midfill.lab.evaluation.models import LocalModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.system.progress import Progress, ignore_progress


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model, and how to run it; the fields but ``processes`` are those of ``LLM``.

    Attributes:
        processes: copies of the model, each in a process of its own and with its share of the
            threads. The threads of one copy wait for each other many times per step, so where other
            programs keep the machine busy, several copies are faster.
    """

    model: str = DEFAULT_MODEL
    adapter: str | None = None
    weights: WeightsOption = "auto"
    kv_dtype: KvDtype = "auto"
    backend: Backend = "auto"
    device: str | None = None
    threads: int | None = None
    fim_tokens: tuple[str, str, str] | None = None
    processes: int = 1

    def fingerprint(self) -> str:
        """Return ``Model.fingerprint`` without loading the model.

        Raises:
            MidfillError: the model or its adapter can't be opened.
        """
        folder = resolve_adapter(self.model, self.adapter)
        return fingerprint_of(open_model(resolve(self.model), folder, self.weights))

    @contextmanager
    def load_copy(
        self, kv_memory: int | None = None, progress: Progress = ignore_progress
    ) -> Iterator[LocalModel]:
        """Load the model into this process alone; its threads end with the block.

        Args:
            kv_memory: bytes for KV; None sizes it from free memory.
            progress: called with (stage, done, total).

        Raises:
            MidfillError: the model can't be found or loaded.
        """
        from midfill.llm import LLM  # slow to import

        with LLM(
            self.model,
            adapter=self.adapter,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            backend=self.backend,
            device=self.device,
            threads=self.threads,
            fim_tokens=self.fim_tokens,
            kv_memory=kv_memory,
            progress=progress,
        ) as llm:
            kv = "" if self.kv_dtype == "auto" else f", KV {self.kv_dtype}"
            yield LocalModel(llm, f"{self.model} (weights {self.weights}{kv})")
