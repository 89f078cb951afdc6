"""Whether a file in the cache may be trusted: who owns it, and who could have written it. Checksums detect damage, not
forgery.
"""

import os
import stat


def why_untrusted(descriptor: int, *, group_may_write: bool = True) -> str | None:
    """Why an opened file must not be used, as the rest of a sentence that begins with its name; None if it may be.

    `group_may_write` lets members of our own groups share the cache: Kubernetes assigns volumes to a group.
    """
    if not hasattr(os, "geteuid"):
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"is owned by user {status.st_uid}, neither this one nor root"
    is_ours = status.st_gid in (os.getegid(), *os.getgroups())
    strangers = stat.S_IWOTH | (0 if group_may_write and is_ours else stat.S_IWGRP)
    if status.st_mode & strangers:
        return f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None
