"""The `agoq` command: `agoq info`, `agoq plan`, `agoq train`, `agoq demo`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ._version import __version__
from .errors import UserError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """A parser whose errors take one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"agoq: error: {message} (see {self.prog} --help)\n")


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of `arguments`: where they start with "info" that of `agoq info` alone, quick to make."""
    parser = _Parser(prog="agoq", description="Training with 4-bit activations and 8-bit gradients.")
    parser.add_argument("--version", action="version", version=f"agoq {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    info_parser = subparsers.add_parser("info", help="versions, CPU instruction set, CUDA library, formats")
    info_parser.add_argument("--json", action="store_true", help="print JSON")
    info_parser.set_defaults(func=_run_info)
    if arguments[:1] != ["info"]:
        from .diloco import cli as diloco_cli
        from .plan import cli as plan_cli
        from .plan import network_cli
        from .training import cli as training_cli

        if diloco_cli.is_asked(arguments):
            plan_parser = subparsers.add_parser("plan", help="the bandwidth that replicas of a model need")
            diloco_cli.add_arguments(plan_parser)
        elif network_cli.is_asked(arguments):
            plan_parser = subparsers.add_parser("plan", help="the time of one gradient exchange")
            network_cli.add_arguments(plan_parser)
        else:
            plan_cli.add_plan_parser(subparsers)
        training_cli.add_train_parser(subparsers)
        training_cli.add_demo_parser(subparsers)
    return parser


def _run_info(args: argparse.Namespace) -> int:
    from . import info

    facts = info.collect()
    print(json.dumps(facts, indent=2) if args.json else info.render(facts))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for what the user can correct, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser(arguments).parse_args(arguments)
        status = int(args.func(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of a pipe, `head` say, has gone. Python would flush once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except UserError as error:
        message = " ".join(str(error).split())
        print(f"agoq: error: {message}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("agoq: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
