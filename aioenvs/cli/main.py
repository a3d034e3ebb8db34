"""The command line: ``aioenvs run`` steps an environment, ``bench`` compares settings, and ``serve`` serves it.

Importing this module, and so ``aioenvs --help``, imports neither torch nor Gymnasium nor numpy.
"""

import argparse
import difflib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from aioenvs.cli.report import EpisodeStats, RunOptions, RunReport, live_line, print_summary, private_memory
from aioenvs.cli.serve import ServeOptions, serve
from aioenvs.cli.targets import EXIT_INTERRUPTED, EXIT_USAGE, CommandError, describe_failure, factory_named

if TYPE_CHECKING:
    import asyncio

    from tensordict import TensorDictBase

    from aioenvs import AsyncParallelEnv, AsyncSerialEnv
    from aioenvs.cli.bench import BenchOptions

TARGET = "ENV_ID|module:factory"
TARGET_HELP = (
    "a Gymnasium id such as CartPole-v1, module:id, or what makes an environment: module:factory or "
    "path/to/file.py:factory"
)
MAX_SEED = 2**32 - 1
MAX_WORKERS = 65535


class UsageError(Exception):
    """Two of the arguments contradict each other."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the option a misspelt one may stand for."""

    def unknown_arguments(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error that names the unknown arguments."""
        known = [option for action in self._actions for option in action.option_strings]
        options = [name.partition("=")[0] for name in unknown if name.startswith("-")]
        near = [match for name in options for match in difflib.get_close_matches(name, known, n=1)]
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type for the integers of ``[low, high]``."""
    allowed = f"an integer of at least {low}" if high == math.inf else f"an integer from {low} to {high}"

    def parse(text: str) -> int:
        with suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"expected {allowed}, got {text!r}")

    return parse


def _build_parser() -> _Parser:
    """Describe the command line."""
    from aioenvs import __version__

    parser = _Parser(
        prog="aioenvs",
        description="Step many reinforcement-learning environments at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"aioenvs {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_run_command(commands)
    _add_bench_command(commands)
    _add_serve_command(commands)
    return parser


def _add_run_command(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """Describe ``aioenvs run``."""
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        help="step an environment with random actions and report speed, returns and memory",
        description="Step copies of one environment with random actions; report speed, returns and memory.",
        argument_default=argparse.SUPPRESS,  # the defaults are those of RunOptions
    )
    run.set_defaults(parser=run)
    add, count, workers = run.add_argument, _integer(1), _integer(1, MAX_WORKERS)
    add("target", metavar=TARGET, help=TARGET_HELP)
    add("--num-workers", type=workers, metavar="N", help="number of environments (default: 8)")
    add(
        "--num-processes",
        type=count,
        metavar="N",
        help="processes or Ray actors that host them (default: one a core), or threads (default: one each)",
    )
    add("--steps", type=count, metavar="N", help="steps of each environment (default: 1000)")
    add("--seed", type=_integer(0, MAX_SEED), metavar="S", help="makes environments and actions repeatable")
    add(
        "--backend",
        choices=["process", "thread", "serial", "ray"],
        help="where environments live (default: process): in processes; in threads of this one, for those that wait "
        "or compute outside of Python's lock; in this thread, one after the other; or in actors of a Ray cluster, "
        "which needs pip install 'aioenvs[ray]' and is the one that RAY_ADDRESS names, or else one of this machine",
    )
    add(
        "--start-method",
        choices=["spawn", "forkserver", "fork"],
        help="how the processes start (default: forkserver)",
    )


def _add_bench_command(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """Describe ``aioenvs bench``."""
    command = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure an environment of yours in several settings and recommend one",
        description="Measure one environment (time and CPU of a step, size of an observation) and several copies of it "
        "in a few settings, beside Gymnasium's AsyncVectorEnv where it fits; recommend a setting.",
        argument_default=argparse.SUPPRESS,  # the defaults are those of BenchOptions
    )
    command.set_defaults(parser=command)
    add = command.add_argument
    add("target", metavar=TARGET, help=TARGET_HELP)
    add("--num-workers", type=_integer(1, MAX_WORKERS), metavar="N", help="number of environments (default: 8)")
    add(
        "--num-processes",
        type=_integer(1, MAX_WORKERS),
        nargs="+",
        metavar="N",
        help="numbers of processes to try (default: a few from 1 to one for each environment)",
    )
    add("--seconds", type=_seconds, metavar="S", help="how long each setting is stepped (default: 1.5)")


def _add_serve_command(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """Describe ``aioenvs serve``."""
    command = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve environments over WebSockets and HTTP, each client with a session of its own",
        description="Serve copies of one environment in the OpenEnv protocol: over WebSockets at /ws, and over HTTP; "
        "with a page at / and metrics at /metrics.",
        argument_default=argparse.SUPPRESS,  # the defaults are those of ServeOptions
    )
    command.set_defaults(parser=command)
    add, count = command.add_argument, _integer(1)
    add("target", metavar=TARGET, help=TARGET_HELP)
    add("--num-envs", type=_integer(1, MAX_WORKERS), metavar="N", help="environments, one a session (default: 64)")
    add("--num-processes", type=count, metavar="N", help="processes that host them (default: one a core)")
    add("--host", help="the address to serve at (default: 127.0.0.1)")
    add("--port", type=_integer(0, 65535), help="the port; 0 for any (default: 8000)")
    add("--idle-seconds", type=_seconds, metavar="S", help="how long a session may be silent (default: 60)")
    add("--max-waiting", type=_integer(0), metavar="N", help="clients that may wait for an environment (default: 256)")
    add("--max-steps", type=count, metavar="N", help="steps that a session may take")
    add("--max-seconds", type=_seconds, metavar="S", help="how long a session may last")
    add("--step-seconds", type=_seconds, metavar="S", help="how long a step or reset may take")
    add("--drain-seconds", type=_seconds, metavar="S", help="how long a stop may take (default: 10)")
    add("--token-env", metavar="NAME", help="the environment variable that has the token clients must show")
    add("--allow-origin", action="append", metavar="ORIGIN", help="an origin whose pages may speak to the server")
    add("--insecure", action="store_true", help="let anybody in who reaches the address")
    add("--render", action="store_true", help="make a Gymnasium id with render_mode='rgb_array', for the page")


def _seconds(text: str) -> float:
    """Read a positive, finite number of seconds."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")


def check_bench_options(options: "BenchOptions") -> None:
    """Check what no single argument can tell; UsageError if two of them contradict each other."""
    _check_processes(max(options.num_processes or [1]), options.num_workers)


def check_options(options: RunOptions) -> None:
    """Check what no single argument can tell; UsageError if two of them contradict each other."""
    backend = options.backend
    if backend != "process" and options.start_method is not None:
        why = "whose actors Ray starts" if backend == "ray" else "which starts no process"
        raise UsageError(f"--start-method has no meaning with --backend {backend}, {why}")
    if backend == "serial" and options.num_processes is not None:
        raise UsageError("--num-processes has no meaning with --backend serial, which starts no process")
    _check_processes(options.num_processes or 1, options.num_workers)


def _check_processes(num_processes: int, num_workers: int) -> None:
    if num_processes > num_workers:
        raise UsageError(
            f"--num-processes {num_processes} is more than --num-workers {num_workers}: "
            "a process hosts at least one environment"
        )


def run(options: RunOptions) -> int:
    """Carry out ``aioenvs run``, whose options `check_options` has checked; returns the exit code.

    CommandError if there is no such environment, what it needs is missing, or the run failed.
    """
    if options.backend == "ray":
        _check_ray()
    factory = factory_named(options.target)
    report = RunReport(options, EpisodeStats(options.num_workers))
    exit_code = 0
    try:
        _run_event_loop(factory, report)
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    print_summary(report)
    return exit_code


def _check_ray() -> None:
    from aioenvs.engine.pools.ray.cluster import import_ray

    try:
        import_ray()
    except ImportError as error:
        raise CommandError(
            f"--backend ray needs Ray, which cannot be imported ({error.__cause__}); to install it: "
            "pip install 'aioenvs[ray]'",
            EXIT_USAGE,
        ) from error


def _run_event_loop(factory: Any, report: RunReport) -> None:
    """Run to the end, with a live line on a terminal."""
    import asyncio

    import torch

    from aioenvs import errors

    if report.options.seed is not None:
        torch.manual_seed(report.options.seed)  # random actions come from torch's global generator
    try:
        with (
            _noting_advice(report),
            live_line(report) as show,
            asyncio.Runner(loop_factory=_event_loop_factory()) as runner,
        ):
            runner.run(_step_all(factory, report, show))
    except Exception as error:
        # What an environment raised carries notes. Anything else is a bug, and shows its traceback.
        if not isinstance(error, errors.AioEnvsError) and not hasattr(error, "__notes__"):
            raise
        raise CommandError(describe_failure(error)) from error


@contextmanager
def _noting_advice(report: RunReport) -> Iterator[None]:
    """Keep what the envs warn of their own speed for the report, and show all other warnings when they come."""
    from aioenvs.errors import PerformanceWarning

    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, PerformanceWarning):
            report.advice.append(str(message))
        else:
            show(message, category, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield


async def _step_all(factory: Any, report: RunReport, show: Callable[[], None]) -> None:
    """Step the environments, keep the report current, and call `show` after every step.

    Cancelling it closes the environments and leaves in the report what was measured until then.
    """
    options = report.options
    build = _env_factory(factory, options)
    constructed = time.perf_counter()
    async with build() as env:
        try:
            if options.seed is not None:
                await env.set_seed(options.seed)
            td = await env.reset()
            started = time.perf_counter()
            report.startup_seconds = started - constructed
            report.num_processes = env.num_processes
            while not report.complete:
                td, next_td = await env.step_and_maybe_reset(env.rand_action(td))
                report.steps += 1
                report.stepping_seconds = time.perf_counter() - started
                report.stats.update(*_rewards_and_ends(env, td))
                td = next_td
                show()
        finally:
            report.memory_bytes = private_memory(env.pids)


def _rewards_and_ends(env: "AsyncParallelEnv | AsyncSerialEnv", td: "TensorDictBase") -> "tuple[Any, Any]":
    """For each env, the sum of all its rewards in a step, and whether its episode ended with any of its parts."""
    import numpy as np

    from aioenvs.tensors.done import done_mask

    following, rewards = td["next"], np.zeros(env.num_workers)
    for key in env.reward_keys:
        rewards += following[key].cpu().numpy().reshape(env.num_workers, -1).sum(1)
    done = done_mask(following, env.done_keys)
    return rewards, done.cpu().numpy().reshape(env.num_workers, -1).any(1)


def _env_factory(factory: Any, options: RunOptions) -> "Callable[[], AsyncParallelEnv | AsyncSerialEnv]":
    """Import what the run needs and return what constructs its environments."""
    from aioenvs import AsyncParallelEnv, AsyncSerialEnv

    if options.backend == "serial":
        return partial(AsyncSerialEnv, options.num_workers, factory)
    return partial(
        AsyncParallelEnv,
        options.num_workers,
        factory,
        num_processes=options.num_processes,
        backend=options.backend,
        mp_start_method=options.start_method,
    )


def _event_loop_factory() -> "Callable[[], asyncio.AbstractEventLoop] | None":
    """Return uvloop's loop, or None (asyncio's own) on a platform without uvloop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _serve(options: ServeOptions) -> int:
    if options.num_processes is not None and options.num_processes > options.num_envs:
        raise UsageError(
            f"--num-processes {options.num_processes} is more than --num-envs {options.num_envs}: "
            "a process hosts at least one environment"
        )
    return serve(options)


def _run(options: RunOptions) -> int:
    check_options(options)
    return run(options)


def _bench(given: dict[str, Any]) -> int:
    from aioenvs.cli.bench import BenchOptions, bench

    options = BenchOptions(**given)
    check_bench_options(options)
    return bench(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments, without the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 when the run failed, 2 for an unknown environment, 130 when interrupted.
        Arguments that make no sense raise ``SystemExit(2)``, as argparse does.
    """
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    given = vars(args)
    command: _Parser = given.pop("parser", parser)
    if unknown:
        command.unknown_arguments(unknown)
    name = given.pop("command")
    if name is None:
        parser.print_help()
        return 0
    try:
        if name == "serve":
            return _serve(ServeOptions(**given))
        return _run(RunOptions(**given)) if name == "run" else _bench(given)
    except UsageError as error:
        command.error(str(error))
    except CommandError as error:
        print(f"{command.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
