"""Groups of options that the ``midfill eval`` commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from midfill.cli.evaluation.options import JsonOption, ProcessesOption, ResumeOption
from midfill.cli.evaluation.run import Outputs, ResultsFile
from midfill.cli.options import (
    AdapterOption,
    BackendOption,
    DeviceOption,
    FimTokensOption,
    ModelOption,
    ThreadsOption,
    WeightsFormatOption,
)
from midfill.cli.outputs import DocsOption, PlotOption
from midfill.config import KvDtype

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from midfill.lab.evaluation.models import Model, ModelChoice
    from midfill.system.progress import Progress


@dataclass(frozen=True)
class ModelFlags:
    """Which model to ask, and how to run it; the fields are ``ModelChoice``'s."""

    model: ModelOption = None
    adapter: AdapterOption = None
    fim_tokens: FimTokensOption = None
    weights: WeightsFormatOption = "auto"
    backend: BackendOption = "auto"
    device: DeviceOption = None
    threads: ThreadsOption = None
    processes: ProcessesOption = 1

    def choice(self, kv_dtype: KvDtype = "auto") -> "ModelChoice":
        """Return the model to ask, the default one if none is named."""
        from midfill.lab.evaluation.models import ModelChoice
        from midfill.models.checkpoints.model_store import DEFAULT_MODEL

        return ModelChoice(
            model=self.model or DEFAULT_MODEL,
            adapter=self.adapter,
            weights=self.weights,
            kv_dtype=kv_dtype,
            backend=self.backend,
            device=self.device,
            threads=self.threads,
            fim_tokens=self.fim_tokens,
            processes=self.processes,
        )

    def open(
        self, progress: "Progress", kv_dtype: KvDtype = "auto"
    ) -> "AbstractContextManager[Model]":
        """Load the model."""
        from midfill.lab.evaluation.models import load_model

        return load_model(self.choice(kv_dtype), progress)

    def check_target(self, folder: Path, keys: str) -> None:
        """Check before the work that what is measured can be noted in a folder.

        Args:
            folder: the folder.
            keys: what a GGUF file may have instead, for the error.

        Raises:
            MidfillError: it is no model's or adapter's folder, or another one's.
        """
        from midfill.errors import OptionError
        from midfill.models.checkpoints.model_record import check_folder
        from midfill.models.checkpoints.model_store import resolve, resolve_adapter

        check_folder(folder, keys)
        model = self.choice().model
        measured = resolve_adapter(model, self.adapter) or resolve(model)
        if folder.resolve() != measured.resolve():
            raise OptionError(f"--write {folder}: what is measured is {measured}; name that folder")


@dataclass(frozen=True)
class ResultFlags:
    """Where the results of a run go."""

    json: JsonOption = None
    resume: ResumeOption = False
    plot: PlotOption = None
    docs: DocsOption = None

    def results_file(self) -> ResultsFile:
        """Return the file that is written during the run.

        Raises:
            MidfillError: there is no file to continue, or it is no report.
        """
        return ResultsFile(self.json, self.resume)

    def outputs(self, section: str) -> Outputs:
        """Return where results go at the end."""
        return Outputs(self.plot, self.docs, section)
