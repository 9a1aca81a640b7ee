"""`meshwright run`: start a script on several processes and keep it going when some are lost; `meshwright members`:
change who takes part. Only this file prints for them."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import click

from .plans import RequestError

__all__ = ["members_command", "run_command"]

_COUNT = click.IntRange(min=1, max=2**16)
_SECONDS = click.FloatRange(min=0, min_open=True, max=1e6)


def _say(text: str) -> None:
    print(f"meshwright: {text}", file=sys.stderr, flush=True)


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc", type=_COUNT, required=True, help="Processes on this machine, one per device.")
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="Machines to wait for at the start.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Where the other machines find this one.")
@click.option("--join", help="host:port of the first machine, on every other one.")
@click.option("--respawn", type=click.IntRange(min=0), default=0, show_default=True, help="Lost processes to replace.")
@click.option("--hang-after", type=_SECONDS, default=30.0, show_default=True, help="Silence that ends a process.")
@click.option("--stall-after", type=_SECONDS, default=600.0, show_default=True, help="No progress: end the one behind.")
@click.option("--least", type=_COUNT, default=1, show_default=True, help="Stop when fewer processes are left.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run_command(
    stream: TextIO,
    script: str,
    arguments: tuple[str, ...],
    nproc: int,
    nodes: int,
    listen: str,
    join: str | None,
    respawn: int,
    hang_after: float,
    stall_after: float,
    least: int,
) -> int:
    """Run SCRIPT, which trains with `mw.elastic`, on several processes.

    When processes are lost the others plan anew, move the state among them and go on. On more machines: --nodes and
    --listen on the first one, --join on the others."""
    _check_script(script)
    if join is not None and (nodes > 1 or listen != "127.0.0.1:0"):
        raise RequestError(
            "'--join' must not be given with --nodes or --listen, got both; these are the first machine's"
        )
    _check_address("--listen", listen)
    from .planner.training.supervisor import Limits, Node, Supervisor

    if join is not None:
        _check_address("--join", join)
        return Node(script, arguments, nproc=nproc, join=join, say=_say).run()
    limits = Limits(hang_s=hang_after, stall_s=stall_after, respawn=respawn, least=least)
    supervisor = Supervisor(script, arguments, nproc=nproc, nodes=nodes, listen=listen, limits=limits, say=_say)
    _say(f"supervising {nproc} processes, at {supervisor.address}")
    return supervisor.run()


def _check_script(script: str) -> None:
    try:
        with open(script, encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        raise RequestError(f"'SCRIPT' must be a Python file, got {script}: {error}") from error


def _check_address(option: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise RequestError(f"'{option}' must be host:port, got {address!r}; e.g. 10.0.0.1:29400")


@click.command("members")
@click.argument("address")
@click.option("--drain", type=click.IntRange(min=0), multiple=True, help="A process that is to hand over and leave.")
@click.option("--add", type=_COUNT, help="So many more processes on the first machine.")
@click.option("--speed", multiple=True, help="PROCESS=SPEED, above 0 to 1 (healthy again), e.g. 3=0.6.")
@click.pass_obj
def members_command(
    stream: TextIO, address: str, drain: tuple[int, ...], add: int | None, speed: tuple[str, ...]
) -> int:
    """Change who takes part in the job that runs at ADDRESS, at the end of a step.

    `meshwright run` prints its address. More machines join with `meshwright run --join ADDRESS`."""
    _check_address("ADDRESS", address)
    if not drain and add is None and not speed:
        raise RequestError("'members' must be given --drain, --add or --speed, got none of them; e.g. --drain 3")
    speeds = [_speed(word) for word in speed]
    from .planner.training.epochs import Event, post
    from .planner.training.watch import connect

    store: Any = connect(address, 10.0)
    for who in drain:
        post(store, Event(kind="drain", who=who))
    for who, text in speeds:
        post(store, Event(kind="slow", who=who, text=text))
    if add is not None:
        post(store, Event(kind="add", who=-1, value=add))
    return 0


def _speed(word: str) -> tuple[int, str]:
    """The process and its speed, as they go into an event."""
    who, _, text = word.partition("=")
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not who.isdecimal() or not 0 < speed <= 1:
        raise RequestError(
            f"'--speed' must be PROCESS=SPEED with a speed above 0 and at most 1, got {word[:60]!r}; --drain a process "
            "that is to go"
        )
    return int(who), repr(speed)
