"""Compilation of kernels that call each other: one function for Python, or a part of its callers.

Numba optimises every function by itself, makes machine code of it and a wrapper that Python can
call. A caller then links the optimised code in and all of that begins anew. The kernels of a
forward pass lie ten calls deep, so most of their code would be compiled ten times.

Here a kernel that is called by another one is only translated to LLVM's IR. It is linked, optimised
and becomes machine code once: inside of the function that Python calls. A few kernels are optimised
by themselves as well, with what they call (``Kernel.optimize_first``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

from llvmlite.binding import Linkage
from numba import types
from numba.core import sigutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering

from midfill.kernels.cpu.compile_child import Signature, compile_in_children
from midfill.kernels.cpu.compiled import CompiledCache
from midfill.kernels.cpu.simd import has_feature


class _LinkedLibrary(JITCodeLibrary):
    """IR of a kernel, which callers link together with that of all kernels that it calls."""

    def finalize(self) -> None:
        """Optimise nothing and make no machine code."""
        self._raise_if_finalized()
        self._link()
        self._finalize_dynamic_globals()
        self._share()
        self._finalized = True

    def linked(self) -> list[Any]:
        """Return the libraries that callers link."""
        return [self, *dict.fromkeys(self._linking_libraries)]

    def _link(self) -> None:
        pass

    def _share(self) -> None:
        """Let callers link the IR itself: each may then hold a copy of these functions.

        Numba lets them link a copy, and keeps both.
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        self._shared_module: Any = self._final_module

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout


class _OptimizedLibrary(_LinkedLibrary):
    """IR of a kernel and of all kernels that it calls, optimised before it is linked."""

    def linked(self) -> list[Any]:
        return [self]

    def _link(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._optimize_final_module()

    def _optimize_functions(self, ll_module: Any) -> None:
        JITCodeLibrary._optimize_functions(self, ll_module)


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(NativeLowering):
    """Translation of a kernel's typed code to IR, without wrappers."""

    _name = "linked_lowering"
    _library: type[_LinkedLibrary] = _LinkedLibrary

    def run_pass(self, state: Any) -> bool:
        state.library = self._library(state.targetctx.codegen(), state.func_id.func_qualname)
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        super().run_pass(state)
        # Callers look the function up by its entry point, which must be a builtin of its own.
        entry_point = [].copy  # type: ignore[var-annotated]
        lowered = state["cr"]
        state.targetctx.insert_user_function(entry_point, lowered.fndesc, state.library.linked())
        state["cr"] = lowered._replace(cfunc=entry_point)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _OptimizedLowering(_LinkedLowering):
    """Translation to IR that is optimised."""

    _name = "optimized_lowering"
    _library = _OptimizedLibrary


class LinkedCompiler(CompilerBase):
    """Numba's compiler for kernels that only other kernels call."""

    _lowering: type[_LinkedLowering] = _LinkedLowering

    def define_pipelines(self) -> list[Any]:
        """Return Numba's usual pipeline, with another lowering."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(self._lowering, NativeLowering)
        passes.passes = [step for step in passes.passes if step[0] is not NativeLowering]
        passes.finalize()
        return [passes]


class _OptimizingCompiler(LinkedCompiler):
    """The compiler of kernels that are optimised before they are linked."""

    _lowering = _OptimizedLowering


class Kernel(CPUDispatcher):
    """A function that Python calls as it does Numba's, and that other kernels link.

    Inside of them, an argument that is a literal counts as any other of its type: each literal
    would be a type of its own, for which all code is compiled again.

    Args:
        function: the Python function.
        options: of Numba's ``njit``.

    Attributes:
        in_child: whether another process compiles it for the cache, which this one loads it from.
    """

    in_child = False

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        options = {**options, "nopython": True}
        super().__init__(function, targetoptions=options)
        self._link_compiler: type[LinkedCompiler] = LinkedCompiler

    def optimize_first(self) -> None:
        """Let the code be optimised by itself before it is linked, and again after that.

        Only on chips with AVX-512: on Zen 3 no gain was seen, and compilation takes a quarter
        longer.
        """
        if has_feature(self.targetctx, "avx512f"):
            self._link_compiler = _OptimizingCompiler

    @cached_property
    def _linked(self) -> CPUDispatcher:
        """What other kernels call."""
        return CPUDispatcher(
            self.py_func, targetoptions=dict(self.targetoptions), pipeline_class=self._link_compiler
        )

    @property
    def linked_signatures(self) -> list[Any]:
        """Argument types with which other kernels call this one."""
        return list(self._linked.signatures)

    def compile(self, sig: Any) -> Any:
        """Return the entry point for argument types; compile or load it if needed."""
        args, _ = sigutils.normalize_signature(sig)
        with compiling_in_children([[(self, tuple(args))]]):
            return super().compile(sig)

    def can_load(self, args: Signature) -> bool:
        """Return whether the entry point isn't here yet, but may be in the cache."""
        return isinstance(self._cache, CompiledCache) and args not in self.overloads

    def compiling(self, args: Signature) -> AbstractContextManager[bool]:
        """See ``CompiledCache.compiling``, for an entry point that ``can_load``."""
        return self._cache.compiling(args, self.targetctx.codegen())

    def compile_here(self, args: Signature) -> None:
        """Compile, or load, the entry point for argument types, for a caller that has the lock."""
        super().compile(args)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Compile for a call in another kernel; see Numba's dispatcher."""
        return self._linked.get_call_template(
            tuple(types.unliteral(kind) for kind in args),
            {name: types.unliteral(kind) for name, kind in dict(kws).items()},
        )

    def get_overload(self, sig: Any) -> Any:
        """Return the entry point that such a call names; see Numba's dispatcher."""
        return self._linked.get_overload(sig)


@contextmanager
def compiling_in_children(groups: Sequence[Sequence[tuple[Kernel, Signature]]]) -> Iterator[None]:
    """Have children compile the entry points that want it and that nobody has compiled yet.

    No other process compiles any of them meanwhile.

    Args:
        groups: what one child compiles each. What entry points of a group have in common is
            translated once.
    """
    with ExitStack() as stack:
        missing = [
            [
                (kernel.py_func, args)
                for kernel, args in calls
                if kernel.can_load(args)
                and stack.enter_context(kernel.compiling(args))
                and kernel.in_child
            ]
            for calls in groups
        ]
        if any(missing):
            compile_in_children([calls for calls in missing if calls])
        yield
