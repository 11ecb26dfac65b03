"""The command line: arguments and what is printed, nothing else. Everything heavy is imported inside the commands."""

from ddtree.cli.app import app, main

__all__ = ["app", "main"]
