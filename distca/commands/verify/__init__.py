"""`distca verify`: proves a machine in minutes, and measures it."""

from distca.commands.verify.command import build_parser, main

__all__ = ["build_parser", "main"]
