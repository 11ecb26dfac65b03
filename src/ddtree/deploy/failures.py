"""What goes wrong while services are changed: told in a line, with what the service itself said last."""

from ddtree.errors import DDTreeError


class DeployFailed(DDTreeError):
    """A step did not come to its end; the message says which, why, and what is running now."""


class Locked(DeployFailed):
    """Another command is at work in the folder."""
