"""The HTTP server: OpenAI's API in front of an engine."""

from ddtree.server.app import create_app
from ddtree.server.run import check_port, serve

__all__ = ["check_port", "create_app", "serve"]
