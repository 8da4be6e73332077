"""The survivors of a failure must learn of it by an event, not because a fallback has passed: a time after which a
process no longer waits for the event. This file makes each fallback longer than any test waits. So a test that ends
proves that the events came.

A test file of @ranks or @devices adds give_no_fallbacks to ranks.before_joining, and uses the fixture `no_fallbacks`
of conftest.py. A script that patched_run(**IN_LAUNCHER) starts with the variables IN_ENV begins with IN_SCRIPT.

The fallbacks of the core remain, because they are constants: release() frees a group of devices by itself after
frees_within_s, and gives it up after aborts_within_s (csrc/backend/shared_group.h). A rank also looks at its group and
its links every longest_sleep_ms (csrc/net/wait.h), but this is how an event reaches a rank that waits in a call.
"""

from __future__ import annotations

import os

from mscomm.cluster import judge, member

NEVER_S = 600.0
IN_ENV = {"MS_NODE_TIMEOUT": str(NEVER_S)}
# How long the hub waits for the words of ranks and launchers.
_OF_JUDGE = ("ANSWERS_WITHIN_S", "BELIEVED_AFTER_S", "CALLS_WITHIN_S", "REASON_WITHIN_S", "RESTARTED_WITHIN_S")
IN_HUB = dict.fromkeys(_OF_JUDGE, NEVER_S)
USUAL_IN_HUB = {name: getattr(judge, name) for name in IN_HUB}
IN_LAUNCHER = {**IN_HUB, "REPORT_S": NEVER_S, "SHORT_S": 0.0}  # restarts without a pause
_OF_RANK = ("LEAVE_S", "SETTLE_S")  # how long a rank waits for the words of the hub
IN_SCRIPT = "from mscomm.cluster import member\n" + "".join(f"member.{name} = {NEVER_S}\n" for name in _OF_RANK)
ASKED_FOR = "TEST_NO_FALLBACKS"  # if this environment variable is set, a rank of @ranks has no fallbacks


def give_no_fallbacks() -> None:
    if os.environ.get(ASKED_FOR):
        for name in _OF_RANK:
            setattr(member, name, NEVER_S)
