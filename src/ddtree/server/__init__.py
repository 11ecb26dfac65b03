"""The HTTP server: OpenAI's API in front of an engine."""

from ddtree.server.app import create_app
from ddtree.server.options import ServerOptions
from ddtree.server.run import check_port, serve

__all__ = ["ServerOptions", "check_port", "create_app", "serve"]
