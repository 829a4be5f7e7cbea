"""Tests stand where the code is, by folder and by name, and every module has some."""

import ast
from functools import cache
from itertools import chain
from pathlib import Path

from midfill.models.families import FAMILIES

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
    "cli/test_progress.py": ("system/progress",),
    "cli/test_usage.py": (
        "cli/cluster",
        "cli/complete",
        "cli/gateway_app",
        "cli/generate",
        "cli/keys",
        "cli/lsp",
        "cli/methods",
        "cli/options",
        "cli/top",
        "lab/cli/bench/app",
        "lab/cli/bench/batch",
        "lab/cli/bench/methods",
        "lab/cli/bench/options",
        "lab/cli/bench/peers",
        "lab/cli/calibrate",
    ),
    "docs/test_commands.py": ("system/extras",),
    "engine/disaggregated/test_workers.py": ("engine/disaggregated/worker_queues",),
    "engine/step/test_speculation.py": ("engine/step/verification",),
    "engine/test_engine.py": (
        "engine/step/plan_execution",
        "engine/step/step_commit",
    ),
    "frontend/test_chat.py": ("frontend/template_worker",),
    "kernels/cpu/altup/test_decoder.py": ("kernels/cpu/altup/data", "kernels/cpu/altup/streams"),
    "kernels/cpu/experts/test_mixture.py": (
        "kernels/cpu/experts/routing",
        "runners/cpu/expert_memory",
    ),
    "kernels/cpu/latent/test_decoder.py": ("kernels/cpu/latent/projections",),
    "kernels/cpu/state_space/test_decoder.py": (
        "kernels/cpu/state_space/data",
        "kernels/cpu/state_space/recurrence",
    ),
    "kernels/cpu/test_kv_cache.py": ("kernels/cpu/bfloat16", "kernels/cpu/halves"),
    "kernels/cpu/test_linear.py": (
        "kernels/cpu/dots",
        "kernels/cpu/matmul",
        "kernels/cpu/panel_blocks",
    ),
    "kernels/cpu/test_pair_segments.py": ("kernels/cpu/pair_panels",),
    "kernels/cpu/test_segments.py": (
        "kernels/cpu/key_panels",
        "kernels/cpu/kv_products",
        "kernels/cpu/segment_attention",
    ),
    "kernels/cpu/test_simd.py": ("kernels/cpu/intrinsics",),
    "kernels/cpu/test_work_stealing.py": ("kernels/cpu/atomics",),
    "lab/bench/ceiling/test_measure.py": ("lab/bench/ceiling/plot", "lab/cli/bench/ceiling"),
    "lab/bench/roofline/test_ceilings.py": ("lab/bench/roofline/arithmetic",),
    "lab/calibration/test_razorattention.py": ("methods/model_probe",),
    "lab/cli/test_bench_scbench.py": ("lab/cli/bench/scbench",),
    "lab/cli/test_bench_serving.py": ("lab/cli/bench/serving",),
    "lab/evaluation/sandbox/test_pool.py": (
        "lab/evaluation/sandbox/isolation",
        "lab/evaluation/sandbox/worker",
    ),
    "lab/evaluation/test_eval_cli.py": (
        "lab/cli/evaluation/app",
        "lab/cli/evaluation/choices",
        "lab/cli/evaluation/confidence",
        "lab/cli/evaluation/far",
        "lab/cli/evaluation/options",
        "lab/cli/evaluation/reuse",
    ),
    "lsp/test_completer.py": ("lsp/api_client",),
    "lsp/test_language_server.py": ("lsp/protocol",),
    "lsp/test_own_server.py": ("lsp/child_server",),
    "methods/contexts/test_sequence.py": ("methods/contexts/method",),
    "methods/evict/test_eviction.py": ("methods/budget",),
    "methods/evict/test_sequence.py": (
        "kv/compressed_prefix",
        "methods/evict/state",
    ),
    "methods/rows/test_sequence.py": ("methods/rows/method",),
    "methods/store/test_cachegen.py": ("kernels/cpu/entropy/rans",),
    "methods/test_codecs.py": ("methods/store/cachegen_profile",),
    "models/test_families.py": (
        "models/family",
        "models/gguf_config",
        "models/huggingface_config",
        *(f"models/{name.replace('-', '')}" for name in FAMILIES),
    ),
    "runners/cpu/test_parts.py": (
        "kernels/cpu/parts/attention",
        "kernels/cpu/parts/keys",
        "kernels/cpu/parts/probe",
        "kv/ragged",
    ),
    "runners/cpu/test_page_selection.py": (
        "kernels/cpu/parts/page_selector",
        "kernels/cpu/parts/page_summaries",
        "runners/torch/page_selection",
    ),
    "runners/cpu/test_quantized_blocks.py": ("kernels/cpu/parts/quantized_attention",),
    "runners/cpu/test_runner.py": (
        "kernels/cpu/decoder_data",
        "runners/forward/cells",
        "runners/forward/layer_rows",
        "runners/forward/runner",
    ),
    "runners/torch/latent_parts/test_runner.py": (
        "runners/torch/latent_parts/group",
        "runners/torch/latent_parts/worker",
    ),
    "runners/torch/test_runner.py": ("runners/torch/altup", "runners/torch/cells"),
    "serving/cluster/test_command.py": ("serving/cluster/deployment",),
    "serving/cluster/test_replicas.py": (
        "serving/cluster/applications",
        "serving/cluster/front",
        "serving/cluster/observed_router",
        "serving/cluster/replica",
        "serving/cluster/router",
        "serving/cluster/serve_handles",
    ),
    "serving/gateway/test_gateway.py": (
        "serving/gateway/discovery",
        "serving/gateway/engine",
        "serving/gateway/options",
        "serving/gateway/pool",
        "serving/gateway/upstream",
        "serving/gateway/upstream_calls",
        "serving/gateway/upstream_http",
    ),
    "runners/torch/test_fused_layers.py": (
        "runners/torch/kernels/hidden_rows",
        "runners/torch/kernels/rotary",
    ),
    "serving/server/batch/test_routes.py": (
        "serving/server/batch/opening",
        "serving/server/batch/upload",
        "serving/server/batch/worker",
    ),
    "serving/server/dialects/test_openai.py": ("serving/server/dialects/logprobs",),
    "serving/server/test_service.py": (
        "serving/server/dialects/dialect",
        "serving/server/dialects/llama_cpp_model",
        "serving/server/served_engine",
    ),
    "serving/server/test_warm_tier.py": ("kv/tiers/warm_tier",),
}
"""A file of tests -> the modules that it tests, of those without a file of tests of their own."""

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


def _has_own_tests(module: Path) -> bool:
    """Whether a file of tests is named like a module, or one in its folder imports it."""
    folder = TESTS / module.parent
    if (folder / f"test_{module.name}.py").exists():
        return True
    imported_as = ".".join(("midfill", *module.parts)).replace("midfill.lab.", "midfill_lab.")
    return any(
        imported_as in names for file, names in all_imports().items() if folder in file.parents
    )


def _is_misplaced(file: Path) -> bool:
    """Whether a file has the name of modules of its part of the code, and is beside none."""
    name = file.stem.removeprefix("test_")
    named = {module for module in MODULES if module.name == name}
    if file.parent / name in named or len(file.parts) == 1:
        return False
    return any(module.parts[0] == file.parts[0] for module in named)


# Each looks at hundreds of files in a moment: a test per file would take longer than its check.


def test_folders_of_tests_mirror_those_of_code() -> None:
    code = {module.parent for module in MODULES}
    assert not [str(folder) for folder in sorted({file.parent for file in FILES} - code)]


def test_files_named_like_a_module_are_beside_its_mirror_image() -> None:
    assert not [str(file) for file in FILES if _is_misplaced(file)]


def test_every_module_has_tests() -> None:
    """A file of tests is named like it, imports it from its folder, or is listed for it."""
    listed = {Path(module) for module in chain(*TESTED_THROUGH.values())}
    assert not [str(module) for module in sorted(PACKAGE - listed) if not _has_own_tests(module)]


def test_what_is_listed_exists_and_has_no_tests_of_its_own() -> None:
    assert not [file for file in TESTED_THROUGH if not (TESTS / file).is_file()]
    listed = {Path(module) for module in chain(*TESTED_THROUGH.values())}
    assert listed <= PACKAGE
    assert not [str(module) for module in sorted(listed) if _has_own_tests(module)]
