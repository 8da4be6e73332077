"""start_thread() starts a thread or raises an error. It never waits for a thread that had no memory to begin."""

from __future__ import annotations

import subprocess
import sys

# Starts threads under a limit that leaves each one its stack and a little more, or less. The threads do not end, for
# otherwise the next thread would use their stacks again.
SCRIPT = """
import re, resource, threading
from mscomm.threads import start_thread

def allow(more):
    used = int(re.search("VmSize:[^0-9]*([0-9]+)", open("/proc/self/status").read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

begun, refused, over = [], 0, threading.Event()
for more in [*range(8 << 20, 0, -(512 << 10)), *range(256 << 10, -(64 << 10), -(4 << 10))]:
    thread = threading.Thread(target=over.wait, daemon=True)
    allow((8 << 20) + more)
    try:
        start_thread(thread)
        begun.append(thread)
    except RuntimeError as error:
        assert "can't start new thread" in str(error), error
        refused += 1
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert all(thread.is_alive() for thread in begun)
over.set()
print(len(begun), refused)
"""


def test_a_thread_starts_or_is_refused() -> None:
    words = ["sh", "-c", 'ulimit -s 8192; exec "$0" "$@"', sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    begun, refused = map(int, done.stdout.split())
    assert begun and refused
