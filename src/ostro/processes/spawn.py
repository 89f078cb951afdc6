"""Starts and stops a subprocess connected by a socket pair. Knows no protocol.

parent   spawn ──────────> child, with its end of the socket as the first argument
         kill_group        kills it and everything that it started
child    leave             the same from within, once its parent is gone
         die_with_parent   the kernel kills it then, where it can
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def spawn(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    files: Sequence[int] = (),
    own_group: bool = True,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a Python subprocess that runs the module; returns it and our end of the socket to it. `options` are for
    the interpreter; `files` are descriptors that it inherits.

    It has its own process group, so that Ctrl-C reaches only this process, which decides what it means, and the child's
    own children can be killed with it. Without `own_group` it joins this process's group and is killed with it. Raises
    OSError if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, *options, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno(), *files],
                stdin=subprocess.DEVNULL,
                process_group=0 if own_group else None,
                env=environment,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the child's process group, which may outlive the child itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def die_with_parent() -> None:
    """On Linux, has the kernel kill this process when its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave() -> NoReturn:
    """Kills this process and everything it started. Abrupt, because work may be running or stuck."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
