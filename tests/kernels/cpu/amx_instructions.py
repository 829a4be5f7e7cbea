"""Program that runs single tile instructions, for test_amx_emulator.py.

Reads cases from a file: a product's name, the tiles' configuration, and their bytes before it.
Writes what is in the tiles, and in the configuration, after it.
"""

import ctypes
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from midfill.runners.cpu.amx import request_amx

TEMPLATE = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.sttilecfg(ptr)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tileloaddt164(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.{name}(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tilerelease()
define void @run(ptr %config, ptr %data, i64 %stride, ptr %stored) {{
  call void @llvm.x86.{configure}(ptr %config)
  %a = getelementptr i8, ptr %data, i64 8192
  %b = getelementptr i8, ptr %data, i64 16384
  call void @llvm.x86.tileloadd64(i8 6, ptr %data, i64 %stride)
  call void @llvm.x86.tileloadd64(i8 1, ptr %a, i64 %stride)
  call void @llvm.x86.tileloaddt164(i8 7, ptr %b, i64 %stride)
  call void @llvm.x86.{name}(i8 6, i8 1, i8 7)
  call void @llvm.x86.tilestored64(i8 6, ptr %data, i64 %stride)
  call void @llvm.x86.tilezero(i8 1)
  call void @llvm.x86.tilestored64(i8 1, ptr %a, i64 %stride)
  call void @llvm.x86.sttilecfg(ptr %stored)
  call void @llvm.x86.tilerelease()
  %after = getelementptr i8, ptr %stored, i64 64
  call void @llvm.x86.sttilecfg(ptr %after)
  ret void
}}
"""
kept: list[Any] = []


def compiled(name: str, configure: str) -> Callable[..., None]:
    """Return ``run`` with a product's instruction, after another one in the place of LDTILECFG."""
    module = llvm.parse_assembly(TEMPLATE.format(name=name, configure=configure))
    machine = llvm.Target.from_default_triple().create_target_machine(
        features="+amx-tile,+amx-int8,+amx-bf16"
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    kept.append(engine)
    kinds = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("run"))


def main(file: Path) -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    request_amx()
    results = []
    for name, configure, config, data, stride in pickle.loads(file.read_bytes()):
        tiles = ctypes.create_string_buffer(data, len(data))
        stored = ctypes.create_string_buffer(128)
        compiled(name, configure)(config, tiles, stride, stored)
        results.append((tiles.raw, stored.raw))
    file.write_bytes(pickle.dumps(results))


main(Path(sys.argv[1]))
