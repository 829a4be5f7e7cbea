"""Sandbox: runs programs that a model wrote and returns which of them pass their tests.

A program and its tests never share a process. The program's process executes the program and
answers calls of its function. The judge, another process, executes the tests, with a function
that forwards each call in the place of the program's own. Only data crosses between them, see
``values``. So nothing that a program does to its own interpreter reaches the verdict: it can walk
frames, replace builtins, return objects that equal everything, end or kill itself. It can pass
only by returning what the tests accept. The judge gets whatever else the tests need (helper
functions beside the tested one) from the reference solution, never from the program, and the
program's process is forked before the tests or the reference solution are read, so they are not
in its memory.

What this changes for a program: its arguments are copies, so tests can't see them changed in
place; what it returns arrives as plain data, so an instance of its own class arrives as the
builtin type it derives from, or as an object that equals nothing.

Every program gets a process and session of its own, an empty working folder, no environment, an
empty standard input, and limits on CPU time, memory, file size, open files and processes (the last
has no effect on root). Its output is discarded. Nothing that it does makes the caller wait longer
than the wall time limit.

How both processes are isolated from the rest of the machine depends on what the system permits:

namespaces (Linux, where unprivileged user namespaces are allowed)
    Guaranteed by the kernel, whatever the program calls, C libraries included. There is no
    network, not even loopback. The root folder holds the Python installation and the system's
    libraries, read-only, and a private folder in memory: no /proc, no home folders, no sockets. No
    other process can be seen or signalled, the judge included. The program has no capabilities and
    can't get any. When it ends or is killed, all processes that it started end too.
audit-hook (elsewhere)
    Guaranteed by Python: an audit hook refuses sockets, processes, ctypes, signals, /proc, and
    writing outside the folder. It stops what Python programs do by ordinary means, which is what
    models write, but not code made to get around it: system calls of an extension module are not
    seen. Other files can be read. The kernel still enforces the limits, a user other than root
    can't start processes or look into the judge's memory, and the program's process group is
    killed as a whole.
"""
