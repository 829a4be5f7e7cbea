"""Tests stand where the code is, by folder and by name, and every module has some."""

import ast
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCES = {
    ".": ROOT / "src" / "midfill",
    "lab": ROOT / "lab" / "src" / "midfill_lab",
    "benchmarks": ROOT / "benchmarks",
}
APART = {"docs", "fuzz", "helpers"}
"""Folders that mirror no code."""

TESTED_THROUGH = {
    "cli/*": "cli/test_usage.py",
    "engine/disaggregated/worker_queues": "engine/disaggregated/test_workers.py",
    "engine/process/aggregate": "serving/cluster/test_remote_engine.py",
    "engine/step/plan_execution": "engine/test_engine.py",
    "engine/step/step_commit": "engine/test_engine.py",
    "engine/step/verification": "engine/step/test_speculation.py",
    "frontend/template_worker": "frontend/test_chat.py",
    "kernels/cpu/entropy/rans": "methods/store/test_cachegen.py",
    "kernels/cpu/parts/*": "runners/cpu/test_parts.py",
    "kernels/cpu/decoder*": "runners/cpu/test_runner.py",
    "kernels/cpu/attention_parts": "runners/cpu/test_parts.py",
    "kernels/cpu/calls": "runners/cpu/test_listers.py",
    "kernels/cpu/segment_attention": "kernels/cpu/test_segments.py",
    "kernels/cpu/*": "kernels/cpu/test_attention.py",
    "kv/compressed_prefix": "methods/evict/test_sequence.py",
    "kv/ragged": "runners/cpu/test_parts.py",
    "kv/tiers/warm_tier": "serving/server/test_warm_tier.py",
    "lab/bench/roofline": "lab/bench/test_profile.py",
    "lab/cli/evaluation/*": "lab/evaluation/test_eval_cli.py",
    "lab/cli/*": "cli/test_usage.py",
    "lab/evaluation/sandbox/*": "lab/evaluation/sandbox/test_pool.py",
    "lsp/api_client": "lsp/test_completer.py",
    "lsp/child_server": "lsp/test_own_server.py",
    "lsp/protocol": "lsp/test_language_server.py",
    "methods/budget": "methods/evict/test_eviction.py",
    "methods/contexts/method": "methods/contexts/test_sequence.py",
    "methods/evict/state": "methods/evict/test_sequence.py",
    "methods/model_probe": "lab/calibration/test_razorattention.py",
    "methods/rows/method": "methods/rows/test_sequence.py",
    "methods/store/cachegen_profile": "methods/test_codecs.py",
    "models/*": "models/test_families.py",
    "runners/forward/*": "runners/cpu/test_runner.py",
    "runners/torch/*": "runners/torch/test_runner.py",
    "serving/cluster/applications": "serving/cluster/test_replicas.py",
    "serving/cluster/deployment": "serving/cluster/test_command.py",
    "serving/cluster/*": "serving/cluster/test_replicas.py",
    "serving/gateway/*": "serving/gateway/test_gateway.py",
    "serving/server/*": "serving/server/test_service.py",
    "serving/top/display": "serving/server/test_top.py",
    "system/progress": "cli/test_progress.py",
    "system/extras": "docs/test_commands.py",
    "system/pip": "models/checkpoints/test_model_store.py",
    "version": "test_cli.py",
}
"""Modules (or all of a folder that have no file of tests of their own) and what tests them."""

MODULES = {
    (Path(place) / path.relative_to(root)).with_suffix("")
    for place, root in SOURCES.items()
    for path in root.rglob("*.py")
}
PACKAGE = {
    module
    for module in MODULES
    if module.parts[0] != "benchmarks" and not module.name.startswith("__")
}
FILES = [
    path.relative_to(TESTS)
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.relative_to(TESTS).parts[0] not in APART
]


def _imports(file: Path) -> set[str]:
    """Return the modules that a file imports, and the names it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@cache
def all_imports() -> dict[Path, set[str]]:
    """Return what each file of tests imports; a second's work, which not all workers need."""
    return {file: _imports(file) for file in sorted(TESTS.rglob("test_*.py"))}


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=str)
def test_a_folder_of_tests_mirrors_one_of_code(folder: Path) -> None:
    assert any(module.parent == folder for module in MODULES)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_named_like_a_module_is_beside_its_mirror_image(file: Path) -> None:
    name = file.stem.removeprefix("test_")
    named = {module for module in MODULES if module.name == name}
    if file.parent / name in named:
        return
    door = file.parts[0]
    misplaced = [module for module in named if module.parts[0] == door and len(file.parts) > 1]
    assert not misplaced, f"{file} tests {misplaced[0]}.py, by its name"


@pytest.mark.parametrize("module", sorted(PACKAGE), ids=str)
def test_every_module_has_tests(module: Path) -> None:
    folder = TESTS / module.parent
    if (folder / f"test_{module.name}.py").exists():
        return
    imported_as = ".".join(("midfill", *module.parts)).replace("midfill.lab.", "midfill_lab.")
    if any(imported_as in names for file, names in all_imports().items() if folder in file.parents):
        return
    through = [file for pattern, file in TESTED_THROUGH.items() if fnmatch(str(module), pattern)]
    assert through, f"no file of tests is named like {module}, imports it or is listed for it"
    assert (TESTS / through[0]).exists()


@pytest.mark.parametrize("pattern", TESTED_THROUGH)
def test_what_is_listed_exists(pattern: str) -> None:
    assert any(fnmatch(str(module), pattern) for module in PACKAGE)
