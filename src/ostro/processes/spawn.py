"""Starting and ending a child that talks to us over a socket pair. Knows no protocol.

parent   spawn ──────> child, with its end of the socket as the first argument
         kill_group    ends it and all that it started
child    leave         the same from within, once nobody is left to work for
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn


def spawn(
    module: str, *arguments: str, environment: Mapping[str, str], options: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A Python process that runs the module, and our end of the socket between us. `options` are the interpreter's.

    It has a process group of its own: Ctrl-C is for us, who decide what it means, and what the child starts can be
    ended with it. Raises OSError if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, *options, "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=environment,
            )
        except OSError:
            ours.close()
            raise
    return process, ours


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the child's process group, which may outlive the child itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def leave() -> NoReturn:
    """Ends this process and what it started. Work may be under way, or stuck, so no orderly way out is sure to end."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
