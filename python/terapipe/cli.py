"""The `terapipe` command: `terapipe VERB ...`. Each verb is a function below; heavy imports happen inside it, so that
`--help` stays fast.

Exit status: 0, or 2 for input that makes no sense (nothing was started), 1 for work that failed, 130 for Ctrl-C, 141
where nobody reads the output any more.
Users see one message; the traceback is there with TPK_LOG=debug. Only errors that carry a message for users are
caught: a mistake of ours keeps its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from terapipe import __version__, files
from terapipe.names import unknown
from terapipe.world import ALONE, World, launched_world

BAD_INPUT, FAILED, INTERRUPTED, CUT_OFF = 2, 1, 130, 141
NEEDED = ("torch", "numpy", "tyro", "rich", "matplotlib")  # pyproject.toml's; an install with --no-deps leaves them out
OUTPUTS = ("--json", "--plot", "--out", "--html", "--png", "--perfetto")  # options that name a file to write


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _set_up_logging()
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("terapipe: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has seen enough; a second error at exit, when the rest is flushed, helps nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except SystemExit as stop:  # tyro and argparse: --help, or arguments they have already explained
        return stop.code if isinstance(stop.code, int) else FAILED
    except ModuleNotFoundError as error:
        if debug or error.name not in NEEDED:
            raise
        sys.stderr.write(
            f"terapipe: {error.name} is not installed, and `{arguments[0]}` needs it: pip install {error.name}\n"
        )
        return FAILED
    except (ValueError, RuntimeError, OSError) as error:
        if debug:
            raise
        sys.stderr.write(f"terapipe: {error}\n")  # in one piece: the ranks of a launch share a terminal
        return BAD_INPUT if isinstance(error, ValueError) else FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"terapipe {__version__}")
        return 0
    name = arguments[0]
    if name not in VERBS:
        raise ValueError(unknown("verb", name, VERBS))
    _check_outputs(arguments[1:])
    return VERBS[name](arguments[1:])


def _check_outputs(arguments: list[str]) -> None:
    """ValueError for a file that cannot be written, before the work whose result it would hold."""
    if (launched_world() or ALONE).rank > 0:
        return
    for option, following in itertools.pairwise([*arguments, "-"]):
        name, _, value = option.partition("=")
        if name in OUTPUTS and (value or not following.startswith("-")):
            files.check_file(Path(value or following), name)


def _overview() -> str:
    lines = [
        "usage: terapipe VERB [OPTIONS]",
        "",
        "Token-level pipeline parallelism: train one long sequence on several devices at once.",
        "",
    ]
    lines += [f"  {name:<11} {(verb.__doc__ or '').splitlines()[0]}" for name, verb in VERBS.items()]
    return "\n".join([*lines, "", "terapipe VERB --help lists the options of a verb; terapipe --version the version."])


def _set_up_logging() -> bool:
    """Logging as TPK_LOG says (debug, info, warning, error); whether it says debug."""
    name = os.environ.get("TPK_LOG", "warning").upper()
    level = logging.getLevelNamesMapping().get(name)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    for ours in ("terapipe", "tpkernels"):
        logging.getLogger(ours).setLevel(logging.WARNING if level is None else level)
    if level is None:
        logging.getLogger("terapipe").warning("TPK_LOG is %r; it must be debug, info, warning or error.", name.lower())
    return name == "DEBUG"


# ---------------------------------------------------------------------------------------------------------------- train


def train(arguments: list[str]) -> int:
    """Train a model: one process, under torchrun, or with --local-ranks N workers."""
    from terapipe.train import command as command_line
    from terapipe.train.config_file import to_toml

    command = command_line.parse(arguments)
    if command.print_config:
        print(to_toml(command.config.resolve()), end="")
        return 0
    from terapipe.train import start, trainer  # imports torch only for work

    here = launched_world()
    world = here or World(size=command.local_ranks or 1, local_size=command.local_ranks or 1)
    if here is not None and command.local_ranks not in (0, here.size):
        raise ValueError(
            f"--local-ranks {command.local_ranks} inside a launch of {here.size} processes; leave one of them out."
        )
    start.check_start(command.config, world=world, resume=command.resume)
    if command.local_ranks and here is None:
        from terapipe.engine import launch

        return launch.run_local(command.local_ranks, ["train", *arguments], threads=command.threads_per_rank)
    result = trainer.train(command.config, resume=command.resume)
    if command.json is not None and result.rank == 0:
        _write_json(command.json, dataclasses.asdict(result))
    return 0


# ------------------------------------------------------------------------------------------------------------------ env


def env(arguments: list[str]) -> int:
    """Show versions, compilers, devices, and which backends and links work here."""
    parser = argparse.ArgumentParser(prog="terapipe env", description=env.__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it here too")
    options = parser.parse_args(arguments)
    from terapipe import environment

    found = environment.collect()
    if options.json is not None:
        _write_json(options.json, found.to_dict())
    print(found)
    return 0


# ---------------------------------------------------------------------------------------------------------------- bench


def bench(arguments: list[str]) -> int:
    """Run a benchmark (from a checkout), its peers in the same run."""
    from terapipe import benchmarking

    modules = benchmarking.find()
    parser = argparse.ArgumentParser(prog="terapipe bench", description=bench.__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"one of: {', '.join(modules) or 'none, this is no checkout'}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and environment here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows (PNG, SVG or PDF by the suffix)")
    options = parser.parse_args(arguments)
    benchmarking.run(modules, options.name, json_file=options.json, plot_file=options.plot)
    return 0


def quickstart(arguments: list[str]) -> int:
    """Train a small model over two stages of this machine and show what slices gain."""
    from terapipe import quickstart

    return quickstart.run(arguments)


def plan(arguments: list[str]) -> int:
    """Search for the fastest plan of a step: slices, schedule, stages, replicas."""
    from terapipe import planning

    return planning.plan(arguments)


def profile(arguments: list[str]) -> int:
    """Measure what slices of a model cost on this machine, for plan."""
    from terapipe import planning

    return planning.profile(arguments)


def simulate(arguments: list[str]) -> int:
    """Show the predicted step of a plan file: table, web page, picture, Perfetto."""
    from terapipe import planning

    return planning.simulate(arguments)


def reproduce(arguments: list[str]) -> int:
    """Replay the paper's experiments in simulation, published numbers beside."""
    from terapipe.planner import reproduce as replay

    return replay.main(arguments)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "quickstart": quickstart,
    "train": train,
    "plan": plan,
    "profile": profile,
    "simulate": simulate,
    "reproduce": reproduce,
    "bench": bench,
    "env": env,
}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """A loss that is not a number becomes null: JSON has no NaN, and the rest of the result still counts."""
    plain = {key: None if isinstance(item, float) and not math.isfinite(item) else item for key, item in value.items()}
    files.write_text(path, json.dumps(plain, indent=2, default=str, allow_nan=False) + "\n")
