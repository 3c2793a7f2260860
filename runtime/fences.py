"""Order between the streams of a device, without the host waiting for any of them.

A *stream* does what it is given one after the other, and the host does not wait: a call that gives it work returns
before the work is done. A *fence* is a place in a stream; another stream that waits for it starts nothing before all
work in front of the fence has ended::

    whole     |inline batch|F1                              wait F3|sampling ...
    decode                  wait F1|batch|F2 ...
    prefill                 wait F1|part|part|part|F3

Fences are how memory is handed over: pages that one stream wrote or read are used by another only behind a fence.
On the host's own cores a call returns when its work is done, so that every fence has passed as soon as it is there.
"""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """A place in a stream: behind all that the stream had been given."""

    def passed(self) -> bool:
        """Whether all in front of it has been done."""

    def wait(self) -> None:
        """Returns when it has passed; the calling thread waits."""


class Stream(Protocol):
    """Does its work in the order in which it is given."""

    def record(self) -> Fence:
        """A fence behind what it was given so far. While other threads give it work, that is any place."""

    def wait(self, fence: Fence) -> None:
        """What it is given from now on starts when the fence has passed. The calling thread need not wait."""


class _Passed:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


#: the fence of a stream that has done all it was given
PASSED: Fence = _Passed()


class Immediate:
    """A ``Stream`` whose work is done when the call returns that gives it."""

    def record(self) -> Fence:
        """A fence that has passed."""
        return PASSED

    def wait(self, fence: Fence) -> None:
        """Has the calling thread wait."""
        fence.wait()
