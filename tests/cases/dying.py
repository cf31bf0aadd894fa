"""A case whose rank is killed while layers move to other ranks."""

import os
import signal

from dynmo.pipeline import actions, resizing
from dynmo.pipeline.case import Dynamism


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(Dynamism):
    name = "dying"

    def act(self, step, layers):
        if os.environ.get("RANK") == os.environ.get("DIES"):
            actions.exchange = resizing.exchange = die
